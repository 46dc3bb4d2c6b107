"""Moves on a stream of their own: `pytest -m gpu tests/gpu`. Skipped where there is no CUDA device."""

import time

import pytest
import torch

from worker_service.cache_engine import CacheEngine, CacheShape
from worker_service.step import StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SHAPE = CacheShape(num_layers=8, block_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def wait_until_moved(cache: CacheEngine, step: int) -> None:
    deadline = time.monotonic() + 20
    while cache.last_moved_step() < step:
        assert time.monotonic() < deadline
    assert not cache.is_moving


def test_blocks_come_back_bit_for_bit_and_in_order() -> None:
    """What is computed before a move is moved; what is computed after its acknowledgement may use both ends."""
    cache = CacheEngine(SHAPE, 64, torch.device("cuda"), num_host_blocks=64)
    content = torch.randn_like(cache.storage[1:])
    ids = tuple(range(1, 65))
    scattered = ids[::-1]
    for step in range(1, 21, 2):
        cache.storage[1:].copy_(content)  # on the compute stream, still running when the move is started
        cache.move(StepPlan(1, step, swap_out_device_blocks=ids, swap_out_host_blocks=scattered))
        wait_until_moved(cache, step)
        cache.storage[1:].fill_(float("nan"))
        cache.move(StepPlan(1, step + 1, swap_in_host_blocks=ids, swap_in_device_blocks=ids))
        wait_until_moved(cache, step + 1)
        assert torch.equal(cache.storage[1:].flip(0), content)


def test_bandwidth_is_that_of_the_bus() -> None:
    cache = CacheEngine(SHAPE, 64, torch.device("cuda"), num_host_blocks=64)
    bandwidth = cache.measure_bandwidth()
    print(f"{bandwidth / 1e9:.1f} GB/s")
    assert 1e9 < bandwidth < 1e12
    assert cache.last_moved_step() == 0
