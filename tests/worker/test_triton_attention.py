"""The Triton backend compared with the reference kernels and torch, over a cache with NaN in unwritten positions."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from pagewire.network.operations import AttentionHeads, BlockPattern
from testing.kernels.device import choose_device

DEVICE = choose_device()

from testing.kernels.recorded_launches import record_attention  # noqa: E402
from tests.worker.attention_rows import E4M3, NUM_LAYERS, PADDING, Rows, changed, copy_cache, random_lengths  # noqa: E402
from worker_service.attention import DeviceRows, create_backend  # noqa: E402
from worker_service.attention.backends.triton import TritonAttention  # noqa: E402

pytestmark = pytest.mark.thorough

NUM_PROCESSORS = 8
SHAPE = {"block_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
DECODES_FIRST = [(40, 1), (0, 1), (16, 1), (15, 1), (0, 20), (33, 9), (20, 1)]


def make_rows(seed, lengths, **options):
    print(f"seed {seed}: {options}, (context, queries): {lengths}")
    return Rows(random.Random(seed), lengths, **{**SHAPE, **options}, device=DEVICE)


def check(
    rows,
    windows=(0,) * NUM_LAYERS,
    tolerance=2e-6,
    batch=None,
    backend=None,
    sinks=(None,) * NUM_LAYERS,
    **fields,
):
    """Attend in every layer, and compare output and cache with the reference, and with the torch backend if it supports
    the rows.

    `fields`: see `changed`.
    """
    shape = changed(rows.shape(windows), **fields)
    backend = backend or TritonAttention(shape, NUM_PROCESSORS, DEVICE)
    expected_cache, torch_cache = copy_cache(rows.kv_cache), copy_cache(rows.kv_cache)
    attend = backend.prepare(batch or rows.batch, rows.kv_cache)
    torch_attend = None
    if rows.shape().cache_dtype == rows.dtype and 0 not in rows.batch.seq_lens:
        torch_attend = create_backend("torch", DEVICE, shape).prepare(rows.batch, torch_cache)
    for layer, cache in enumerate(expected_cache):
        query, key, value = rows.random_qkv(rows.batch.query_start_loc[-1], layer)
        actual = attend(layer, query, key, value, sinks[layer])
        scoring = replace(shape.scorings(DEVICE)[layer], sinks=sinks[layer])
        expected = rows.expected(layer, cache, (query, key, value), scoring)
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
        if torch_attend is not None:
            torch.testing.assert_close(
                actual, torch_attend(layer, query, key, value, sinks[layer]), rtol=0, atol=tolerance
            )
    for actual_layer, expected_layer in zip(rows.kv_cache, expected_cache, strict=True):
        for held, expected in zip(actual_layer, expected_layer, strict=True):
            torch.testing.assert_close(held.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def with_device_rows(batch, num_decodes, bound=0):
    """Return the batch as made by a runner whose rows are on the device; the host only knows bounds of the lengths."""
    rows = DeviceRows.of(batch.query_start_loc, batch.seq_lens, DEVICE)
    seq_lens = [max(bound, length) for length in batch.seq_lens]
    return replace(
        batch,
        seq_lens=seq_lens,
        block_tables=batch.block_tables.to(torch.int32),
        device_rows=replace(rows, num_decodes=num_decodes),
    )


@pytest.mark.parametrize("seed", range(12))
def test_equals_reference_on_random_batches(seed):
    rng = random.Random(seed)
    options = {
        "block_size": rng.choice([16, 32, 48]),
        "num_kv_heads": (num_kv_heads := rng.choice([1, 2, 3])),
        "num_heads": num_kv_heads * rng.choice([1, 2, 7]),
        "head_dim": rng.choice([32, 40, 64]),
    }
    check(make_rows(seed, [random_lengths(rng, 16) for _ in range(rng.randint(1, 4))], **options))


@pytest.mark.parametrize("seed", range(6))
def test_windows_equal_reference_and_read_nothing_before(seed):
    rng = random.Random(1000 + seed)
    window = rng.choice([1, 2, 15, 16, 17, 48, rng.randint(1, 120)])
    rows = make_rows(seed, [random_lengths(rng, 16) for _ in range(rng.randint(1, 4))])
    rows.poison_before(window)
    check(rows, windows=(window, max(1, window // 2)))


@pytest.mark.parametrize("block_size", [16, 32])
def test_layers_of_different_patterns(block_size):
    lengths = [(0, 1), (63, 1), (64, 1), (300, 1), (0, 130), (63, 65), (190, 3)]
    rows = make_rows(4, lengths, block_size=block_size)
    check(rows, patterns=(BlockPattern(64, 1, 3, 1, 1), None))


def test_layers_of_different_windows():
    check(make_rows(0, DECODES_FIRST), windows=(0, 10))


@pytest.mark.parametrize("num_decodes", [None, 5])
@pytest.mark.parametrize("windows", [(0, 0), (0, 10), (17, 600)])
def test_layers_of_each_group_use_their_own_blocks(windows, num_decodes):
    """Both layers use the same bytes, through different tables. Blocks before a window belong to other rows."""
    rows = make_rows(16, [(40, 1), (0, 1), (599, 1), (15, 1), (40, 1), (0, 20), (33, 9)], layer_groups=(0, 1))
    for group, window in enumerate(windows):
        if window:
            rows.poison_before(window, group)
    check(rows, windows, batch=with_device_rows(rows.batch, num_decodes))


@pytest.mark.parametrize("num_decodes", [None, 3])
@pytest.mark.parametrize("layer_groups", [(0, 0), (0, 1)])
def test_layers_of_different_heads(layer_groups, num_decodes):
    layers = (AttentionHeads(4, 1, 48, 0.2), AttentionHeads(6, 2, 32, 0.1))
    lengths = [(40, 1), (0, 1), (299, 1), (0, 20), (33, 9)]
    rows = make_rows(17, lengths, layers=layers, layer_groups=layer_groups)
    if layer_groups[1]:
        rows.poison_before(10, 1)
    check(rows, (0, 10), batch=with_device_rows(rows.batch, num_decodes))


@pytest.mark.parametrize("num_decodes", [0, 2, 4])
def test_any_number_of_the_rows_that_have_one_token_may_be_told_to_decode(num_decodes):
    rows = make_rows(1, DECODES_FIRST)
    check(rows, batch=with_device_rows(rows.batch, num_decodes))


@pytest.mark.parametrize("windows", [(0, 0), (10, 600)])
@pytest.mark.parametrize("bound", [600, 100_000])
def test_lengths_that_the_host_knows_are_bounds(bound, windows):
    """The host's lengths are only bounds, as in the replay of a graph.

    The batch has padding rows, lengths below the bounds, and rows divided into splits.
    """
    rows = make_rows(2, [(40, 1), (0, 1), (599, 1), PADDING, PADDING])
    check(rows, windows, batch=with_device_rows(rows.batch, 5, bound))


@pytest.mark.parametrize("bound", [0, 100_000])
@pytest.mark.parametrize("windows", [(0, 0), (10, 600)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(40, 1), (599, 1), (33, 20), (0, 9)],
        [(40, 1), (3, 1), (0, 1)],
        [(33, 20), (0, 9)],
        [(599, 1), (15, 2), PADDING],
    ],
)
def test_the_device_alone_may_know_which_rows_decode(lengths, windows, bound):
    rows = make_rows(14, lengths)
    check(rows, windows, batch=with_device_rows(rows.batch, None, bound))


def test_tokens_of_padding_are_one_row_and_rows_of_padding_have_none():
    """Of 20 tokens, one row decodes, one row has 4, and the rest are padding, as in a graph for any mix of rows."""
    rows = make_rows(15, [(40, 1), (33, 4), (0, 15)])
    rows.batch.seq_lens[2] = 0
    rows.batch.slot_mapping[0, 5:] = -1
    starts, lengths = [0, 1, 5, 20, 20, 20], [41, 37, 0, 0, 0]
    tables = torch.cat([rows.batch.block_tables, rows.batch.block_tables[:, :2]], dim=1).to(torch.int32)
    device_rows = replace(DeviceRows.of(starts, lengths, DEVICE), num_decodes=None)
    batch = replace(rows.batch, query_start_loc=[], seq_lens=[900] * 5, block_tables=tables, device_rows=device_rows)
    check(rows, (0, 30), batch=batch)


def test_rows_of_padding_get_zeros_and_write_nothing():
    check(make_rows(3, [(20, 1), PADDING, (3, 1), PADDING]))
    check(make_rows(4, [PADDING]))


@pytest.fixture
def launched(monkeypatch):
    """Return a list of the launched attention kernels, by name, with their grids."""
    return record_attention(monkeypatch)


def names(launched):
    return [name for name, _ in launched]


def test_few_long_rows_are_cut_into_splits(launched):
    rows = make_rows(5, [(700, 1), (5, 1)])
    check(rows, windows=(0, 256))
    assert names(launched) == ["paged_attention_v2", "paged_attention_v1"]
    launched.clear()
    check(make_rows(6, [(512, 1), (40, 3)]), windows=(0, 256))
    assert names(launched) == [
        "paged_attention_v2",
        "paged_prefill",
        "paged_attention_v1",
        "paged_prefill",
    ]


def test_slopes_and_sinks_of_heads_in_rows_of_every_kind(launched):
    rows = make_rows(13, [(700, 1), (5, 1), (37, 20), (0, 9)])
    sinks = 2 * torch.randn(NUM_LAYERS, 4, generator=torch.Generator().manual_seed(13))
    slopes = (0.5, 0.1, 0.02, 1.0)
    check(rows, (0, 30), 4e-6, sinks=sinks.to(DEVICE), alibi_slopes=slopes, softcap=3.0, has_sinks=True)
    assert names(launched) == [
        "paged_attention_v2",
        "paged_prefill",
        "paged_attention_v1",
        "paged_prefill",
    ]


def test_bounds_of_many_rows_count_as_what_the_cache_holds(launched):
    """Each bound of a graph's row is the maximal length. One row may be that long, but never all at once."""
    rows = make_rows(12, [(length, 1) for length in range(1, 11)])
    check(rows, batch=with_device_rows(rows.batch, 10, bound=100_000))
    assert names(launched) == ["paged_attention_v2"] * NUM_LAYERS


def test_memory_of_splits_serves_steps_of_fewer_and_of_more_rows():
    backend = TritonAttention(make_rows(7, [(1, 1)]).shape((0, 0)), NUM_PROCESSORS, DEVICE)
    for num_rows in (2, 1, 3, 2):
        check(make_rows(num_rows, [(600 + row, 1) for row in range(num_rows)]), backend=backend)


def test_a_backend_serves_one_cache_after_another_and_keeps_none():
    """A backend keeps no reference to a cache; measuring memory uses a separate one."""
    first, second = make_rows(16, [(40, 1), (3, 5)]), make_rows(17, [(40, 1), (3, 5)], block_size=32)
    backend = TritonAttention(first.shape((0, 0)), NUM_PROCESSORS, DEVICE)
    check(first, backend=backend)
    caches = [weakref.ref(part) for layer in first.kv_cache for part in layer]
    del first
    gc.collect()
    assert not any(cache() is not None for cache in caches)
    check(second, backend=backend)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, tolerance):
    check(make_rows(8, [(40, 1), (33, 20), (0, 9)], dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float32, 1e-5)])
def test_cache_of_8_bit_floats(dtype, tolerance):
    rows = make_rows(9, [(40, 1), (600, 1), (33, 20), (0, 9)], dtype=dtype, cache_dtype=E4M3)
    check(rows, tolerance=tolerance, windows=(0, 30))


def test_row_reads_blocks_that_another_row_of_the_step_writes():
    rows = make_rows(10, [(0, 16), (16, 4)])
    rows.batch.block_tables[0, 1, 0] = rows.batch.block_tables[0, 0, 0]
    check(rows)


def test_heads_as_a_merged_projection_leaves_them():
    rows = make_rows(11, [(20, 1), (3, 9)])
    attend = TritonAttention(rows.shape(), NUM_PROCESSORS, DEVICE).prepare(rows.batch, rows.kv_cache)
    query, key, value = rows.random_qkv(10)
    merged = torch.cat([query, key, value], dim=1)  # [T, all heads, head_dim]
    assert torch.equal(attend(0, *merged.split([4, 2, 2], dim=1)), attend(0, query, key, value))
