import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagewire.common.wire.messages import FIRST_STATE_ID, StepPlan, WorkerProtocolError
from pagewire.kernels.cache_rows import read_rows, write_rows
from testing.worker.host_blocks import host_block
from worker_service.cache.cache_engine import CacheEngine, CacheShape
from worker_service.startup.loader import log_size

GIB = 1 << 30
HEAD_DIM = 5
SHAPE = CacheShape(heads=((2, HEAD_DIM),) * 3, block_size=4, dtype=torch.bfloat16)


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
    assert cache.storage[5].view(6, 4, 2, 5)[:, 3, 1, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_head_major_blocks_show_the_same_views() -> None:
    cache = CacheEngine(replace(SHAPE, is_head_major=True), 7, torch.device("cpu"))
    cache.storage.zero_()
    for number, view in enumerate((view for layer in cache.layers for view in layer), start=1):
        assert view.shape == (8, 4, 2, 5)
        assert view[0, :, 1].is_contiguous()
        view[5, 3, 1] = number
    assert cache.storage.count_nonzero() == 6 * 5
    assert cache.storage[5].view(6, 2, 4, 5)[:, 1, 3, 0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("is_head_major", [False, True])
def test_layers_of_different_groups_share_the_bytes_of_a_block(is_head_major: bool) -> None:
    """Blocks hold layers 0 and 3, of 2 heads of 8, or layer 1 of 1 head of 16, or layers 2 and 4 of 1 head of 8."""
    heads, groups = ((2, 8), (1, 16), (1, 8), (2, 8), (1, 8)), ((0, 3), (1,), (2, 4))
    shape = CacheShape(heads, 4, torch.float32, is_head_major, groups)
    cache = CacheEngine(shape, 3, torch.device("cpu"))
    assert cache.storage.shape == (4, shape.block_elements) == (4, 2 * 2 * 4 * 2 * 8)
    for layers in groups:
        cache.storage.zero_()
        views = [view for layer in layers for view in cache.layers[layer]]
        for number, view in enumerate(views, start=1):
            assert not view.any()
            view[2] = number
        assert [tuple(view.shape) for view in views] == [(4, 4, *heads[layer]) for layer in layers for _ in range(2)]
        runs = torch.cat([torch.full((view[2].numel(),), number) for number, view in enumerate(views, start=1)])
        assert torch.equal(cache.storage[2, : len(runs)].long(), runs)
        assert cache.storage.count_nonzero() == len(runs)


def test_cache_below_one_sequence_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_size(SHAPE, 10, max_model_len=20)
    assert "KV cache: 10 blocks of 4 tokens, enough for 2.00 sequences of max_model_len (20), 5.16 KiB" in caplog.text
    assert "less than one sequence" not in caplog.text
    log_size(SHAPE, 10, max_model_len=41)
    assert "less than one sequence of max_model_len 41" in caplog.text


def test_cache_below_one_sequence_is_not_warned_of_where_windows_fit(caplog: pytest.LogCaptureFixture) -> None:
    log_size(SHAPE, 10, max_model_len=1000, windows=(32,))
    assert "less than one sequence" not in caplog.text
    log_size(SHAPE, 10, max_model_len=1000, windows=(40,))
    assert "less than one sequence" in caplog.text


# Moves and copies. All elements of device block i are i, and all elements of host block i are 100 + i.


def numbered_cache(num_device_blocks: int = 12, num_host_blocks: int = 6) -> CacheEngine:
    return numbered(CacheEngine(SHAPE, num_device_blocks, torch.device("cpu"), num_host_blocks))


def numbered(cache: CacheEngine) -> CacheEngine:
    for block, content in enumerate(cache.storage):
        content.fill_(block)
    for block in range(1, cache.num_host_blocks + 1):
        host_block(cache, block).fill_(100 + block)
    return cache


def contents(storage: torch.Tensor) -> list[int]:
    """Return the number that fills each block."""
    flat = storage.flatten(1)
    assert torch.equal(flat.amin(1), flat.amax(1))
    return flat[:, 0].int().tolist()


def host_contents(cache: CacheEngine) -> list[int]:
    """Return the number that fills each host block, from block 1 on."""
    return contents(torch.stack([host_block(cache, block) for block in range(1, cache.num_host_blocks + 1)]))


def execute(cache: CacheEngine, **columns: Any) -> None:
    plan = StepPlan(1, 7, **columns)
    cache.check(plan)
    cache.move(plan)
    cache.copy(plan)
    assert cache.last_moved_step() == 7
    assert not cache.is_moving


def test_moves_go_both_ways() -> None:
    cache = numbered_cache()
    execute(
        cache,
        swap_out_device_blocks=(3, 4, 9),
        swap_out_host_blocks=(1, 2, 6),
        swap_in_host_blocks=(4, 5, 3),
        swap_in_device_blocks=(10, 11, 1),
    )
    assert host_contents(cache) == [3, 4, 103, 104, 105, 9]
    assert contents(cache.storage) == [0, 103, 2, 3, 4, 5, 6, 7, 8, 9, 104, 105, 12]


def test_all_reads_of_copies_come_before_the_writes() -> None:
    cache = numbered_cache()
    execute(cache, copy_source_blocks=(1, 2, 3, 3, 9), copy_target_blocks=(2, 3, 1, 8, 10))
    assert contents(cache.storage) == [0, 3, 1, 2, 4, 5, 6, 7, 3, 9, 9, 11, 12]


def test_copies_read_what_moves_brought() -> None:
    cache = numbered_cache()
    columns = {"swap_in_host_blocks": (4,), "swap_in_device_blocks": (6,)}
    execute(cache, copy_source_blocks=(6,), copy_target_blocks=(7,), **columns)
    assert contents(cache.storage)[5:8] == [5, 104, 104]


@pytest.mark.parametrize("seed", range(20))
def test_random_moves_and_copies(seed: int) -> None:
    rng = random.Random(seed)
    cache = numbered_cache(num_device_blocks=30, num_host_blocks=20)
    for _ in range(20):
        device, host = contents(cache.storage), [100, *host_contents(cache)]
        num_out, num_in, num_copies = rng.randrange(8), rng.randrange(8), rng.randrange(8)
        out_sources, out_targets = rng.choices(range(1, 31), k=num_out), rng.sample(range(1, 21), num_out)
        if rng.random() < 0.5:  # long consecutive runs
            out_sources = list(range(4, 4 + num_out))
            out_targets = list(range(9, 9 + num_out))
        in_sources = rng.choices(sorted(set(range(1, 21)).difference(out_targets)), k=num_in)
        in_targets = rng.sample(sorted(set(range(1, 31)).difference(out_sources)), num_in)
        copy_sources, copy_targets = rng.choices(range(1, 31), k=num_copies), rng.sample(range(1, 31), num_copies)
        execute(
            cache,
            swap_out_device_blocks=tuple(out_sources),
            swap_out_host_blocks=tuple(out_targets),
            swap_in_host_blocks=tuple(in_sources),
            swap_in_device_blocks=tuple(in_targets),
            copy_source_blocks=tuple(copy_sources),
            copy_target_blocks=tuple(copy_targets),
        )
        moved_out, moved_in = [device[block] for block in out_sources], [host[block] for block in in_sources]
        for block, content in zip(out_targets, moved_out, strict=True):
            host[block] = content
        for block, content in zip(in_targets, moved_in, strict=True):
            device[block] = content
        copied = [device[block] for block in copy_sources]
        for block, content in zip(copy_targets, copied, strict=True):
            device[block] = content
        assert (contents(cache.storage), [100, *host_contents(cache)]) == (device, host)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"swap_out_device_blocks": (1,)}, "swap_out names 1 blocks to read and 0 to write"),
        ({"swap_out_host_blocks": (1,)}, "swap_out names 0 blocks to read and 1 to write"),
        ({"swap_out_device_blocks": (0,), "swap_out_host_blocks": (1,)}, "swap_out reads blocks 0 to 0; .* 1 to 12"),
        ({"swap_out_device_blocks": (13,), "swap_out_host_blocks": (1,)}, "swap_out reads blocks 13 to 13"),
        ({"swap_out_device_blocks": (1, 1), "swap_out_host_blocks": (0, 7)}, "writes blocks 0 to 7; .* 1 to 6"),
        ({"swap_out_device_blocks": (1, 2), "swap_out_host_blocks": (3, 3)}, "swap_out writes a block twice"),
        ({"swap_in_host_blocks": (7,), "swap_in_device_blocks": (1,)}, "swap_in reads blocks 7 to 7; ids are 1 to 6"),
        ({"swap_in_host_blocks": (1,), "swap_in_device_blocks": (2**32 - 1,)}, "swap_in writes blocks 4294967295"),
        ({"swap_in_host_blocks": (1, 2), "swap_in_device_blocks": (4, 4)}, "swap_in writes a block twice"),
        (
            {
                "swap_out_device_blocks": (5, 6),
                "swap_out_host_blocks": (1, 2),
                "swap_in_host_blocks": (4, 3),
                "swap_in_device_blocks": (7, 5),
            },
            "device block 5 is swapped out and in by one plan",
        ),
        (
            {
                "swap_out_device_blocks": (5, 6),
                "swap_out_host_blocks": (3, 2),
                "swap_in_host_blocks": (4, 3),
                "swap_in_device_blocks": (7, 8),
            },
            "host block 3 is swapped out and in by one plan",
        ),
        ({"swap_in_device_blocks": (4,)}, "swap_in names 0 blocks to read and 1 to write"),
        ({"copy_source_blocks": (1, 2), "copy_target_blocks": (3,)}, "copy names 2 blocks to read and 1 to write"),
        ({"copy_source_blocks": (1,), "copy_target_blocks": (0,)}, "copy writes blocks 0 to 0"),
        ({"copy_source_blocks": (13,), "copy_target_blocks": (1,)}, "copy reads blocks 13 to 13"),
        ({"copy_source_blocks": (1, 2), "copy_target_blocks": (4, 4)}, "copy writes a block twice"),
    ],
)  # fmt: skip
def test_bad_moves_and_copies(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkerProtocolError, match=text):
        numbered_cache().check(StepPlan(1, 1, **columns))


# Moves of states. All values of device state i are i, and all values of host state i are 100 + i.


def cache_with_states() -> CacheEngine:
    cache = numbered(
        CacheEngine(SHAPE, 12, torch.device("cpu"), 6, state_size=3, num_device_states=5, num_host_states=4)
    )
    cache.states[1:] = torch.arange(1, 6)[:, None]
    host_states(cache)[1:] = torch.arange(101, 105)[:, None]
    return cache


def host_states(cache: CacheEngine) -> torch.Tensor:
    return cache._state_moves._host_blocks.view(torch.float32)


def state(number: int) -> int:
    return FIRST_STATE_ID + number


def test_states_move_among_blocks() -> None:
    cache = cache_with_states()
    execute(
        cache,
        swap_out_device_blocks=(3, state(4), 2, state(3)),
        swap_out_host_blocks=(1, state(1), 2, state(4)),
        swap_in_host_blocks=(state(2), 6, state(3)),
        swap_in_device_blocks=(state(1), 7, state(2)),
        copy_source_blocks=(4,),
        copy_target_blocks=(5,),
    )
    assert cache.states[:, 0].tolist() == [0, 102, 103, 3, 4, 5]
    assert host_states(cache)[1:].tolist() == [[4] * 3, [102] * 3, [103] * 3, [3] * 3]
    assert contents(cache.storage) == [0, 1, 2, 3, 4, 4, 6, 106, 8, 9, 10, 11, 12]
    assert [contents(host_block(cache, block)[None])[0] for block in (1, 2)] == [3, 2]
    cache.fill_states_with_nan([2, 5])
    assert cache.states.isnan().all(1).tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"swap_out_device_blocks": (state(0),), "swap_out_host_blocks": (state(1),)},
            "reads states 0 to 0; .* 1 to 5",
        ),
        ({"swap_out_device_blocks": (state(6),), "swap_out_host_blocks": (state(1),)}, "swap_out reads states 6 to 6"),
        ({"swap_in_host_blocks": (state(1),), "swap_in_device_blocks": (state(6),)}, "swap_in writes states 6 to 6"),
        ({"swap_in_host_blocks": (state(5),), "swap_in_device_blocks": (state(1),)}, "reads states 5 to 5; .* 1 to 4"),
        ({"swap_out_device_blocks": (state(1),), "swap_out_host_blocks": (1,)}, "a block to a state, or a state to"),
        ({"swap_out_device_blocks": (1,), "swap_out_host_blocks": (state(1),)}, "swap_out writes blocks 2147483649"),
        (
            {"swap_out_device_blocks": (1, state(1)), "swap_out_host_blocks": (state(2), 2)},
            "swap_out_device_blocks and swap_out_host_blocks move a block to a state, or a state to a block",
        ),
        ({"swap_out_device_blocks": (state(1),)}, "swap_out_device_blocks names 1 blocks to read and 0 to write"),
        (
            {"swap_out_device_blocks": (state(1), state(2)), "swap_out_host_blocks": (state(3), state(3))},
            "swap_out writes a state twice",
        ),
        (
            {
                "swap_out_device_blocks": (state(1),),
                "swap_out_host_blocks": (state(3),),
                "swap_in_host_blocks": (state(2),),
                "swap_in_device_blocks": (state(1),),
            },
            "device state 1 is swapped out and in by one plan",
        ),
        ({"copy_source_blocks": (state(1),), "copy_target_blocks": (state(2),)}, "copy reads blocks 2147483649"),
    ],
)
def test_bad_moves_of_states(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkerProtocolError, match=text):
        cache_with_states().check(StepPlan(1, 1, **columns))


def test_a_cache_without_states_moves_none() -> None:
    with pytest.raises(WorkerProtocolError, match="swap_out reads states 1 to 1; this pool has no states"):
        numbered_cache().check(StepPlan(1, 1, swap_out_device_blocks=(state(1),), swap_out_host_blocks=(state(1),)))


def test_the_bandwidth_is_that_of_blocks() -> None:
    cache = cache_with_states()
    assert cache.measure_bandwidth() > 0
    assert cache.states[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_cache_of_fp8_is_half_as_large_and_moves_like_any() -> None:
    shape = replace(SHAPE, dtype=torch.float8_e4m3fn)
    assert 2 * shape.block_bytes == SHAPE.block_bytes
    cache = CacheEngine(shape, 4, torch.device("cpu"), 2)
    cache.storage[1:] = torch.arange(1, 5)[:, None].to(shape.dtype)
    execute(cache, swap_out_device_blocks=(2, 3), swap_out_host_blocks=(2, 1))
    execute(
        cache, swap_in_host_blocks=(2,), swap_in_device_blocks=(4,), copy_source_blocks=(3,), copy_target_blocks=(1,)
    )
    assert contents(cache.storage.float()) == [0, 3, 2, 3, 2]


def test_a_cache_of_int8_has_its_scales_in_the_blocks() -> None:
    """The scales follow a head's values at each position, so that moves and copies of blocks include them."""
    shape = replace(SHAPE, dtype=torch.int8)
    values = torch.tensor([HEAD_DIM + 4, 2 * HEAD_DIM])
    assert [shape.block_bytes, SHAPE.block_bytes] == (values * (SHAPE.block_bytes // values[1])).tolist()
    cache = CacheEngine(shape, 4, torch.device("cpu"), 2)
    written = torch.randn(shape.block_size, 2, HEAD_DIM)
    keys, later_values = cache.layers[-1]
    later_values[3] = write_rows(written, shape.dtype)
    expected = read_rows(later_values[3].clone(), torch.float32)
    execute(
        cache, swap_out_device_blocks=(3,), swap_out_host_blocks=(1,), copy_source_blocks=(3,), copy_target_blocks=(2,)
    )
    execute(cache, swap_in_host_blocks=(1,), swap_in_device_blocks=(4,))
    for block in (2, 4):
        assert torch.equal(read_rows(later_values[block], torch.float32), expected)
    cache.fill_with_nan([[4, 3]], 0, 1)
    spoilt = read_rows(later_values, torch.float32)[4].isnan()
    assert spoilt[0].all()
    assert not spoilt[1:].any()
    assert read_rows(keys, torch.float32)[4, 0].isnan().all()


@pytest.mark.parametrize("is_head_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_positions_are_spoilt_and_no_others(dtype: torch.dtype, is_head_major: bool) -> None:
    cache = CacheEngine(replace(SHAPE, dtype=dtype, is_head_major=is_head_major), 5, torch.device("cpu"))
    cache.storage.view(torch.uint8).zero_()
    cache.fill_with_nan([[4, 2, 5]], 3, 9)  # the last position of block 4, all of 2, the first of 5
    for keys, values in cache.layers:
        for view in (keys, values):
            spoilt = view.float().isnan()
            assert torch.equal(spoilt.all(3).all(2), spoilt.any(3).any(2))
            assert spoilt.any(3).any(2).nonzero().tolist() == [[2, 0], [2, 1], [2, 2], [2, 3], [4, 3], [5, 0]]


def test_moves_without_a_host_pool_are_refused() -> None:
    cache = numbered_cache(num_host_blocks=0)
    with pytest.raises(WorkerProtocolError, match="swap_out writes blocks 1 to 1; this pool has no blocks"):
        cache.check(StepPlan(1, 1, swap_out_device_blocks=(1,), swap_out_host_blocks=(1,)))
    assert cache.measure_bandwidth() == 0.0


def test_bandwidth_is_measured() -> None:
    assert 1e6 < numbered_cache().measure_bandwidth() < 1e13
