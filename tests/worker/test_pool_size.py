"""The sizes of the block pools: as configured, by default, and the errors if they do not fit."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from worker_service.config import WorkerConfig
from worker_service.startup import loader
from worker_service.startup.device_memory import DeviceMemory, StepSize
from worker_service.startup.pool_size import (
    Counts,
    PoolSize,
    blocks_of_sequence,
    count_blocks,
    cpu_cache_bytes,
    default_swap_bytes,
)

MIB, GIB = 1 << 20, 1 << 30


def test_cpu_cache_is_modest() -> None:
    assert cpu_cache_bytes(100 * GIB) == 4 * GIB
    assert cpu_cache_bytes(10 * GIB) == 3 * GIB


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


@pytest.mark.parametrize(
    ("available", "num_local_ranks", "expected"),
    [
        (200 * GIB, 1, 4 * GIB),
        (40 * GIB, 1, 4 * GIB),
        (32 * GIB, 1, 32 * GIB // 10),
        (32 * GIB, 2, 32 * GIB // 20),
        (200 * GIB, 8, 200 * GIB // 80),
        (1000 * GIB, 8, 4 * GIB),
        (0, 1, 0),
    ],
)
def test_a_gpu_swaps_by_default(available: int, num_local_ranks: int, expected: int) -> None:
    assert default_swap_bytes("cuda", available, num_local_ranks) == expected


def test_a_cpu_does_not_swap_by_default() -> None:
    assert default_swap_bytes("cpu", 1000 * GIB, 1) == 0


def sizes(max_num_blocks: int = 1000, block_bytes: int = MIB, **options: Any) -> PoolSize:
    return PoolSize(WorkerConfig(model="m", **options), block_bytes, max_num_blocks)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4095),  # 4 GiB of blocks of 1 MiB, of which one is never used
        ({"swap_space": "0"}, 0),
        ({"swap_space": "0GiB"}, 0),
        ({"num_host_blocks": 0}, 0),
        ({"num_host_blocks": 7}, 7),
        ({"swap_space": "10MiB"}, 9),
    ],
)
def test_what_is_said_counts_before_the_default(options: dict[str, Any], expected: int) -> None:
    assert sizes(**options).host_counts(100 * GIB, default_bytes=4 * GIB) == (expected, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kv_cache_memory": "999GiB"},
            "--kv-cache-memory is 999GiB, but the KV cache uses only 1001.00 MiB: .*--max-num-seqs 7 ",
        ),
        ({"kv_cache_memory": "1002MiB"}, "--kv-cache-memory is 1002MiB, but the KV cache uses only 1001.00 MiB"),
        ({"kv_cache_memory": "1001.9MiB"}, None),
        ({}, None),
    ],
)
def test_a_pool_that_is_smaller_than_was_asked_says_so(options: dict[str, Any], said: str | None) -> None:
    found = sizes(**options, max_num_seqs=7).describe_reduced()
    assert found is None if said is None else re.search(said, found or "")


@pytest.mark.parametrize("default_bytes", [0, 1, MIB, 2 * MIB - 1])
def test_a_default_that_holds_no_block_is_none(default_bytes: int) -> None:
    assert sizes().host_counts(100 * GIB, default_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": "11GiB"}, "--swap-space is 11GiB, which takes 11.00 GiB; 10.00 GiB of memory are available"),
        ({"num_host_blocks": 20_000}, "--num-host-blocks is 20000, which takes 19.53 GiB; 10.00 GiB"),
        (
            {"num_device_blocks": 20_000},
            "--num-device-blocks is 20000: 20000 blocks take 19.53 GiB; 10.00 GiB of memory are available; 10239 "
            "blocks fit, 10.00 GiB: lower --num-device-blocks",
        ),
        ({"kv_cache_memory": "11GiB", "max_num_blocks": 20_000}, "--kv-cache-memory is 11GiB: 11263 blocks take 11.00"),
        (
            {"num_device_blocks": 6000, "num_host_blocks": 6000},
            "--num-host-blocks is 6000, which takes 5.86 GiB; 4.14",
        ),
    ],
)
def test_a_pool_beyond_the_memory_of_a_cpu_names_its_flag(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(**options).counts_of_cpu(10 * GIB)


def test_a_cpu_without_memory_has_room_for_no_block() -> None:
    with pytest.raises(ValueError, match=r"the KV cache may use 0 bytes, but two blocks need 2.00 MiB; free memory"):
        sizes().counts_of_cpu(-GIB)
    assert sizes().counts_of_cpu(GIB) == ((306, 0), (0, 0))  # 30 %, of which one block is never used


# Models with states. A block of 16 tokens takes 1 MiB, and a state 8 MiB.


def sizes_with_states(max_model_len: int = 512, **options: Any) -> PoolSize:
    return replace(sizes(100_000, **options), state_bytes=8 * MIB, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("max_model_len", "options", "expected"),
    [
        # A sequence of 512 tokens takes 3 * 8 MiB and 32 MiB, so 560 MiB have room for 10 sequences.
        (512, {"kv_cache_memory": "560MiB"}, (560 - 30 * 8 - 1, 29)),
        # Longer sequences count as 4,096 tokens: 24 MiB of 280 MiB, so 5,600 MiB have room for 20 sequences.
        (100_000, {"kv_cache_memory": "5600MiB"}, (5600 - 60 * 8 - 1, 59)),
        # There are at least 12 states.
        (100_000, {"kv_cache_memory": "560MiB"}, (560 - 13 * 8 - 1, 12)),
        (512, {"kv_cache_memory": "106MiB"}, (1, 12)),
        (512, {"kv_cache_memory": "560MiB", "max_num_seqs": 2}, (560 - 13 * 8 - 1, 12)),
        # The states of a given number of blocks are in addition.
        (512, {"num_device_blocks": 320}, (320, 30)),
        (512, {"num_device_blocks": 2}, (2, 12)),
        (100_000, {"num_device_blocks": 2560}, (2560, 30)),
        (512, {"num_device_blocks": 32_000, "max_num_seqs": 100}, (32_000, 404)),
        (512, {}, (3072 - 164 * 8 - 1, 163)),  # 30 % of 10 GiB
    ],
)
def test_memory_is_divided_between_blocks_and_states(
    max_model_len: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    found = sizes_with_states(max_model_len, **options)
    device = found.device_counts(100 * GIB if options else 10 * GIB)
    assert device == expected
    if "kv_cache_memory" in options:
        assert found.size(device) == int(options["kv_cache_memory"].removesuffix("MiB")) * MIB


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0, 0)),
        ({"swap_space": "0"}, (0, 0)),
        ({"swap_space": "560MiB"}, (560 - 30 * 8 - 1, 29)),
        ({"num_host_blocks": 320}, (320, 30)),
        ({"num_host_blocks": 0}, (0, 0)),
    ],
)
def test_swap_space_is_divided_by_the_same_rule(options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert sizes_with_states(num_device_blocks=2, **options).counts_of_cpu(10 * GIB)[1] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_cache_memory": "105MiB"},
            "the KV cache may use 105.00 MiB, but two blocks and 13 states need 106.00 MiB; raise --kv-cache-memory",
        ),
        ({"swap_space": "105MiB"}, "--swap-space is 105MiB; two blocks and 13 states take 111149056 bytes: raise it"),
        (
            {"num_device_blocks": 900},
            "--num-device-blocks is 900: 900 blocks take 901.00 MiB; 1.00 GiB of memory are available, of which 84 "
            "states take 680.00 MiB; 343 blocks fit, 344.00 MiB: lower --num-device-blocks",
        ),
        ({"num_device_blocks": 2, "num_host_blocks": 980}, "--num-host-blocks is 980, which takes 1.6[0-9] GiB; 1.00"),
    ],
)
def test_memory_that_is_too_small_for_states(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes_with_states(**options).counts_of_cpu(GIB)


class Rank:
    """A fake communicator with the attributes that sizes depend on."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "options", "expected"),
    [
        # A tenth of 36 GiB, divided by the ranks that share the machine, in blocks of 1 MiB, less block 0.
        (1, 1, {}, 3685),
        (1, 8, {}, 3685),
        (2, 2, {}, 1842),
        (4, 2, {}, 1842),  # two machines
        (2, 1, {}, 3685),  # one pod for each rank
        (1, 1, {"swap_space": "0"}, 0),
        (1, 1, {"swap_space": "1GiB"}, 1023),
    ],
)
def test_the_loader_gives_a_gpu_its_host_blocks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_gpus: int, options: dict[str, Any], expected: int
) -> None:
    asked = sizes(num_device_blocks=10, **options)
    memory = DeviceMemory(total=80 * GIB, others=GIB, weights=GIB, step=GIB, graphs=0, staging=0)
    measured: list[Counts] = []
    monkeypatch.setattr(loader, "available_bytes", lambda: 36 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(
        loader._RunnerParts, "_measure_memory", lambda self, sizes, host: measured.append(host) or memory
    )
    parts: dict[str, Any] = dict.fromkeys(
        (
            "model",
            "network",
            "alibi_slopes",
            "dtype",
            "weight_format",
            "weight_bytes",
            "backend",
            "shape",
            "windows",
            "quantization",
            "streams",
            "kernels",
            "digest",
            "dense",
        )
    )
    assembly = loader._RunnerParts(
        config=asked.config, device=torch.device("cuda"), max_model_len=1024, communicator=Rank(num_ranks), **parts
    )
    assert assembly.counts(asked) == ((10, 0), (expected, 0))
    assert measured == [(expected, 0)], "its staging is counted among what a GPU's memory is taken by"


def test_a_sequence_needs_blocks_for_the_windows_of_its_groups() -> None:
    assert blocks_of_sequence((0,), 100, 16, 64) == 7
    # A window of 20 before a step of 32 tokens may begin with the last position of a block.
    assert blocks_of_sequence((0, 19, 20), 1024, 16, 32) == 64 + 2 * 5
    # A decode step reads and writes the positions of the window alone.
    assert [blocks_of_sequence((window,), 1024, 16, 1) for window in (1, 2, 17, 18, 33)] == [1, 2, 2, 3, 3]
    assert blocks_of_sequence((90, 20), 100, 16, 64) == 7 + 7, "never more than the whole sequence"


@pytest.mark.parametrize("options", [{"num_device_blocks": 6}, {"kv_cache_memory": "7MiB"}])
def test_a_pool_without_a_block_for_each_layer_group_is_refused(options: dict[str, Any]) -> None:
    asked = replace(sizes(**options), num_groups=7)
    with pytest.raises(ValueError, match=r"6 blocks of 1.00 MiB.* each of the model's 7 layer groups"):
        asked.device_counts(GIB)
    with pytest.raises(ValueError, match="7 layer groups"):
        asked.gpu_counts(DeviceMemory(GIB, 0, 0, 0, 0, 0), StepSize(64, 8))
    assert replace(asked, num_groups=6).device_counts(GIB) == (6, 0)


class Failing:
    """A fake assembly whose runner fails with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def runner(self, device: Counts, host: Counts) -> None:
        raise self._error


def test_pools_that_cannot_be_allocated_name_their_sizes() -> None:
    pool, counts = sizes(block_bytes=GIB), (Counts(8), Counts(1))
    with pytest.raises(ValueError, match=r": 8 device blocks, 9.00 GiB, and 1 host blocks, 2.00 GiB: lower --num-dev"):
        loader._allocate(Failing(MemoryError()), pool, *counts)
    with pytest.raises(RuntimeError, match="of another kind"):
        loader._allocate(Failing(RuntimeError("of another kind")), pool, *counts)


def test_a_gpu_is_asked_for_no_more_than_it_has_before_a_weight_is_loaded() -> None:
    before = DeviceMemory(total=24 * GIB, others=GIB, weights=15 * GIB, step=0, graphs=0, staging=0)
    step = StepSize(2048, 256)
    with pytest.raises(ValueError, match=r"--num-device-blocks is 9000: 9000 blocks take 8.79 GiB; of the GPU's 24.00"):
        sizes(num_device_blocks=9000).gpu_counts(before, step)
    assert sizes(num_device_blocks=8000).gpu_counts(before, step) == (8000, 0)
