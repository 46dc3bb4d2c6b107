import logging

import pytest
import torch

from worker_service.cache_engine import (
    CacheEngine,
    CacheShape,
    available_cpu_bytes,
    count_blocks,
    cpu_cache_bytes,
    gpu_cache_bytes,
    log_size,
)

GIB = 1 << 30
SHAPE = CacheShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=5, dtype=torch.bfloat16)


def test_block_bytes_are_those_of_the_storage() -> None:
    cache = CacheEngine(SHAPE, 7, torch.device("cpu"))
    assert SHAPE.block_bytes == 2 * 3 * 4 * 2 * 5 * 2
    assert cache.storage.numel() * cache.storage.element_size() == 8 * SHAPE.block_bytes
    assert cache.storage[2].is_contiguous()
    assert not cache.storage[0].any()


def test_layers_are_disjoint_views_of_the_storage() -> None:
    cache = CacheEngine(SHAPE, 7, torch.device("cpu"))
    cache.storage.zero_()
    for number, view in enumerate((view for layer in cache.layers for view in layer), start=1):
        assert view.shape == (8, 4, 2, 5)
        assert not view.any()
        view[5, 3, 1] = number
    assert cache.storage.count_nonzero() == 6 * 5
    assert cache.storage[5].flatten(0, 1)[:, 3, 1, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_cpu_cache_is_modest() -> None:
    assert cpu_cache_bytes(100 * GIB) == 4 * GIB
    assert cpu_cache_bytes(10 * GIB) == 3 * GIB
    assert available_cpu_bytes() > 0


def test_gpu_cache_is_what_the_peak_leaves() -> None:
    assert gpu_cache_bytes(total_bytes=80 * GIB, used_bytes=20 * GIB, utilization=0.9) == 52 * GIB
    assert gpu_cache_bytes(total_bytes=80 * GIB, used_bytes=75 * GIB, utilization=0.9) < 0


@pytest.mark.parametrize(
    ("cache_bytes", "max_num_blocks", "expected"),
    [(100, 50, 9), (109, 50, 9), (110, 50, 10), (1000, 50, 50), (20, 9, 1)],
)
def test_count_blocks(cache_bytes: int, max_num_blocks: int, expected: int) -> None:
    assert count_blocks(cache_bytes=cache_bytes, block_bytes=10, max_num_blocks=max_num_blocks, remedy="") == expected


@pytest.mark.parametrize("cache_bytes", [19, 0, -5])
def test_no_room_for_a_block_names_the_remedy(cache_bytes: int) -> None:
    with pytest.raises(ValueError, match="lower --block-size"):
        count_blocks(cache_bytes=cache_bytes, block_bytes=10, max_num_blocks=5, remedy="lower --block-size")


def test_cache_below_one_sequence_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_size(SHAPE, 10, max_model_len=20)
    assert "KV cache: 10 blocks, 40 tokens, 2.00 x max_model_len (20)" in caplog.text
    assert "less than one sequence" not in caplog.text
    log_size(SHAPE, 10, max_model_len=41)
    assert "less than one sequence of max_model_len 41" in caplog.text
