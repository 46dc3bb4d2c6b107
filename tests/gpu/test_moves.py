"""Moves on a separate CUDA stream: `pytest -m gpu tests/gpu`. Skipped without a CUDA device."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from pagewire.common.wire.messages import StepPlan
from testing.worker.host_blocks import host_block
from worker_service.cache.cache_engine import CacheEngine, CacheShape
from worker_service.device.cuda import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SHAPE = CacheShape(heads=((8, 128),) * 8, block_size=16, dtype=torch.bfloat16)


def create_cache(dtype: torch.dtype = torch.bfloat16) -> tuple[CacheEngine, CudaDevice]:
    device = CudaDevice(torch.device("cuda"))
    shape = replace(SHAPE, dtype=dtype)
    cache = CacheEngine(shape, 64, device.torch_device, num_host_blocks=64, streams=device)
    device.synchronize()
    return cache, device


def wait_until_moved(cache: CacheEngine, step: int) -> None:
    deadline = time.monotonic() + 20
    while cache.last_moved_step() < step:
        assert time.monotonic() < deadline
    assert not cache.is_moving


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_bit_for_bit_and_in_order(dtype: torch.dtype) -> None:
    """A move copies the results of earlier computation. Computation after its acknowledgement may use both ends."""
    cache, device = create_cache(dtype)
    assert host_block(cache, 1).is_pinned()
    stored = cache.storage[1:].view(torch.uint8)
    content = torch.randint_like(stored, 256)
    device.synchronize()
    ids = tuple(range(1, 65))
    scattered = ids[::-1]
    for step in range(1, 21, 2):
        device.compute.run(partial(stored.copy_, content))  # still running when the move starts
        cache.move(StepPlan(1, step, swap_out_device_blocks=ids, swap_out_host_blocks=scattered))
        wait_until_moved(cache, step)
        device.compute.run(partial(stored.fill_, 0xFF))
        cache.move(StepPlan(1, step + 1, swap_in_host_blocks=ids, swap_in_device_blocks=ids))
        wait_until_moved(cache, step + 1)
        assert torch.equal(stored.flip(0), content)


def test_copies_read_before_they_write() -> None:
    cache, device = create_cache()
    for block in range(1, 7):
        cache.storage[block] = block
    device.synchronize()
    cache.copy(StepPlan(1, 1, copy_source_blocks=(1, 2, 3), copy_target_blocks=(4, 5, 6)))
    cache.copy(StepPlan(1, 2, copy_source_blocks=(4, 5, 6), copy_target_blocks=(5, 6, 4)))
    device.synchronize()
    assert cache.storage[1:7, 0, 0, 0, 0, 0].tolist() == [1, 2, 3, 3, 1, 2]


def test_bandwidth_is_that_of_the_bus() -> None:
    cache, _ = create_cache()
    bandwidth = cache.measure_bandwidth()
    print(f"{bandwidth / 1e9:.1f} GB/s")
    assert 1e9 < bandwidth < 1e12
    assert cache.last_moved_step() == 0
