"""The C kernels compared with the specification, over caches that contain NaN outside the rows' positions."""

import os
import platform
import pwd
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import pagewire.kernels.cpu
from deploy.platform_wheel import variants_of
from pagewire.kernels import reference
from pagewire.kernels.arguments import NormRopeParams, Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS, read_rows, row_size, write_rows
from pagewire.kernels.cpu import PagedRows, library
from pagewire.kernels.cpu.library import (
    FLAGS,
    VARIANTS,
    build_library,
    choose_variant,
    flags_of,
    sources,
)
from pagewire.kernels.weight import StoredWeight
from testing.kernels.compiler import build_variants, first_compiler, skip_without_compiler
from testing.kernels.variants import load_variant
from tests.kernels.paged import paged_attention, store_kv
from worker_service.startup.cpu_kernels import environment_build, load_cpu_kernels

pytestmark = pytest.mark.one_of_each

NUM_LAYERS = 2
HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 192, 256, 320, 384, 448, 512)
# A few times the rounding error of the output's dtype, for values of a few units.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
# Dtypes of queries, and of the cache.
DTYPES = [
    *((dtype, dtype) for dtype in TOLERANCES),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    *((dtype, cache_dtype) for cache_dtype in EIGHT_BITS for dtype in TOLERANCES),
]


@dataclass
class Step:
    """Rows with their context in a cache of several layers; blocks are out of order, and other positions are NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: list[int]
    query_start_loc: list[int]

    def check(
        self,
        cpu_kernels,
        *,
        tolerance=None,
        num_threads=None,
        window=0,
        alibi_slopes=None,
        softcap=0.0,
        sinks=None,
        is_bidirectional=False,
    ):
        scoring = Scoring(self.query.shape[-1] ** -0.5, window, alibi_slopes, softcap, sinks, is_bidirectional)
        rows = (self.block_tables, self.seq_lens, self.query_start_loc, scoring)
        # In float64, so that the tolerance covers only the kernels' rounding.
        expected = reference.paged_attention(self.query.double(), self.key_cache, self.value_cache, *rows)
        actual = paged_attention(
            cpu_kernels, self.query, self.key_cache, self.value_cache, *rows, num_threads=num_threads
        )
        assert actual.dtype == self.query.dtype
        if tolerance is None:
            tolerance = TOLERANCES[self.query.dtype]
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)
        return actual


def make_step(
    rng, lengths, *, head_dim, group, num_kv_heads, block_size, dtype=torch.float32, cache_dtype=None, window=0
):
    """Return a step. `lengths`: (context, queries) of each row.

    Blocks entirely before a window belong to other rows, and are not written.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    cache_dtype = cache_dtype or dtype

    def randn(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    seq_lens = [context + queries for context, queries in lengths]
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = list(range(1, sum(num_blocks) + 4))
    rng.shuffle(ids)
    order = (block_size, num_kv_heads)
    is_head_major = rng.random() < 0.5
    sizes = (NUM_LAYERS, 2, *(reversed(order) if is_head_major else order))
    bytes_of_row = row_size(head_dim, cache_dtype) * cache_dtype.itemsize
    storage = torch.full((len(ids) + 1, *sizes, bytes_of_row), 0xFF, dtype=torch.uint8).view(cache_dtype)  # NaN
    storage = storage.transpose(3, 4) if is_head_major else storage
    key_cache, value_cache = storage[:, 1, 0], storage[:, 1, 1]
    block_tables = torch.zeros(len(lengths), max(num_blocks), dtype=rng.choice([torch.int32, torch.int64]))
    query_start_loc = [0]
    for row, (context, queries) in enumerate(lengths):
        table = torch.tensor([ids.pop() for _ in range(num_blocks[row])])
        first = max(0, context - window + 1) if window else 0
        positions = torch.arange(first, seq_lens[row])
        place = table[positions // block_size], positions % block_size
        for cache in (key_cache, value_cache):
            rows = write_rows(randn(len(positions), num_kv_heads, head_dim, dtype=torch.float32), cache_dtype)
            cache.view(torch.uint8)[place] = rows.view(torch.uint8)
        table[: first // block_size] = ids[0]
        block_tables[row, : len(table)] = table
        query_start_loc.append(query_start_loc[-1] + queries)
    # As in a merged projection: the heads of keys and values follow the heads of queries.
    query = randn(query_start_loc[-1], (group + 2) * num_kv_heads, head_dim, dtype=dtype)[:, : group * num_kv_heads]
    return Step(query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)


def random_lengths(rng, block_size, max_queries):
    """Return the (context, queries) of a row; ends and contexts are often at or beside block edges."""
    edges = [block_size * k + d for k in range(1, 5) for d in (-1, 0, 1)]
    context = rng.choice([0, rng.choice(edges), rng.randint(1, 300)])
    num_queries = rng.choice([1, 1, 2, 3, 5, rng.choice(edges), rng.randint(1, max_queries)])
    return context, min(num_queries, max_queries)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_paged_attention_equals_reference_on_random_steps(cpu_kernels, seed, dtype, cache_dtype):
    rng = random.Random(seed)
    group = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 16])
    block_size = rng.choice([8, 16, 32, 64, 128])
    shape = {
        "head_dim": rng.choice(HEAD_DIMS),
        "group": group,
        "num_kv_heads": rng.choice([1, 2, 3, 8, 9]),
        "block_size": block_size,
    }
    max_queries = 600 if seed % 5 == 0 and group <= 4 else 40
    lengths = [random_lengths(rng, block_size, max_queries) for _ in range(rng.randint(1, 6))]
    window = rng.choice([0, 0, 1, block_size, rng.randint(2, 200)])
    num_threads = rng.choice([None, 4])
    sinks = torch.tensor([rng.uniform(-3, 3) for _ in range(group * shape["num_kv_heads"])]) if seed % 3 == 0 else None
    print(f"seed {seed}: {shape}, (context, queries): {lengths}, window {window}, threads {num_threads}, {sinks}")
    step = make_step(rng, lengths, **shape, dtype=dtype, cache_dtype=cache_dtype, window=window)
    step.check(cpu_kernels, window=window, num_threads=num_threads, sinks=sinks)


@pytest.mark.parametrize(
    ("seed", "head_dim", "group", "num_kv_heads", "block_size"),
    [
        *((1, head_dim, 2, 2, 16) for head_dim in HEAD_DIMS),
        # Sizes that are not multiples of a vector.
        *((2, head_dim, 3, 1, 8) for head_dim in (1, 2, 7, 19, 33, 40, 100, 255, 257, 511)),
    ],
)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_every_head_size(cpu_kernels, seed, head_dim, group, num_kv_heads, block_size, dtype, cache_dtype):
    shape = {"head_dim": head_dim, "group": group, "num_kv_heads": num_kv_heads, "block_size": block_size}
    step = make_step(random.Random(seed), [(70, 1), (30, 9), (0, 40)], **shape, dtype=dtype, cache_dtype=cache_dtype)
    step.check(cpu_kernels)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 6, 8, 9, 16])
@pytest.mark.parametrize("num_rows", [1, 3, 30])
def test_every_number_of_kv_heads_that_take_turns(cpu_kernels, num_rows, num_kv_heads, num_threads):
    lengths = [(70 + 9 * row, 1 + (row == 2) * 20) for row in range(num_rows)]
    step = make_step(
        random.Random(12), lengths, head_dim=32, group=2, num_kv_heads=num_kv_heads, block_size=16, window=50
    )
    slopes = torch.tensor([2 ** -(1 + head / 4) for head in range(2 * num_kv_heads)])
    step.check(cpu_kernels, num_threads=num_threads, window=50, alibi_slopes=slopes)


@pytest.mark.parametrize("group", [*range(1, 17), 71])
def test_every_group_ratio(cpu_kernels, group):
    lengths = [(70, 1), (130, 5), (0, 20)]
    make_step(random.Random(3), lengths, head_dim=32, group=group, num_kv_heads=2, block_size=16).check(cpu_kernels)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 128])
@pytest.mark.parametrize("num_queries", [1, 5, 33])
def test_every_length_around_the_block_edges(cpu_kernels, block_size, num_queries):
    contexts = {max(0, edge + d - num_queries) for edge in (block_size, 2 * block_size, 64, 128) for d in (-1, 0, 1)}
    lengths = [(context, num_queries) for context in {*contexts, *range(10)}]
    make_step(random.Random(4), lengths, head_dim=32, group=2, num_kv_heads=2, block_size=block_size).check(cpu_kernels)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 300])
def test_windows_read_nothing_before(cpu_kernels, window):
    lengths = [(200, 1), (0, 150), (100, 70), (window, 1), (window - 1, 1), (window, window + 1), (5, 3)]
    shape = {"head_dim": 32, "group": 2, "num_kv_heads": 2, "block_size": 16}
    step = make_step(random.Random(5), lengths, **shape, window=window)
    step.check(cpu_kernels, window=window)
    step.check(cpu_kernels, window=window, num_threads=8)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 2, 63, 64, 300])
def test_rows_that_attend_in_both_directions(cpu_kernels, window, dtype):
    shape = {"head_dim": 32, "group": 2, "num_kv_heads": 2, "block_size": 16, "dtype": dtype}
    step = make_step(random.Random(13), [(0, 300), (0, 1), (0, 16), (0, 65), (0, 17)], **shape)
    outputs = [
        step.check(cpu_kernels, window=window, num_threads=num, is_bidirectional=True, softcap=2.0) for num in (1, 2, 8)
    ]
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("softcap", [0.0, 1.5, 50.0])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_alibi_softcap_and_sinks(cpu_kernels, window, softcap, is_biased, has_sinks):
    lengths = [(300, 1), (0, 90), (50, 30), (7, 1)]
    shape = {"head_dim": 64, "group": 4, "num_kv_heads": 2, "block_size": 16}
    step = make_step(random.Random(6), lengths, **shape, window=window)
    step.query *= 4  # scores of up to a few tens
    slopes = torch.tensor([2 ** -(head + 1) for head in range(8)]) if is_biased else None
    # Some sinks are negligible, and some make everything else negligible.
    sinks = torch.tensor([-torch.inf, -200.0, -3.0, 0.0, 2.0, 30.0, 300.0, 1e4]) if has_sinks else None
    step.check(cpu_kernels, tolerance=2e-5, window=window, alibi_slopes=slopes, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 6])
@pytest.mark.parametrize("lengths", [[(3000, 1)], [(2999, 4)], [(1500, 1), (1, 1)], [(257, 1)], [(1, 1)]])
def test_context_is_split_between_threads(cpu_kernels, num_threads, lengths, num_kv_heads):
    step = make_step(random.Random(7), lengths, head_dim=64, group=2, num_kv_heads=num_kv_heads, block_size=16)
    step.check(cpu_kernels, num_threads=num_threads)


def test_shared_blocks_and_equal_rows(cpu_kernels):
    step = make_step(random.Random(8), [(40, 1), (40, 1), (20, 21)], head_dim=64, group=2, num_kv_heads=2, block_size=8)
    step.block_tables[1] = step.block_tables[0]
    step.block_tables[2, :2] = step.block_tables[0, :2]
    step.query[1] = step.query[0]
    step.check(cpu_kernels)
    rows = (step.block_tables, step.seq_lens, step.query_start_loc, Scoring(0.125))
    output = paged_attention(cpu_kernels, step.query, step.key_cache, step.value_cache, *rows)
    assert torch.equal(output[0], output[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key_cache", "value_cache", "query"])
def test_bad_values_of_a_row_come_through_and_touch_no_other(cpu_kernels, value, part):
    step = make_step(random.Random(9), [(90, 1), (90, 1)], head_dim=64, group=2, num_kv_heads=1, block_size=16)
    if part == "query":
        step.query[0] = value
    else:
        getattr(step, part)[step.block_tables[0, 2], 5] = value
    rows = (step.block_tables, step.seq_lens, step.query_start_loc, Scoring(0.125))
    expected = reference.paged_attention(step.query, step.key_cache, step.value_cache, *rows)
    actual = paged_attention(cpu_kernels, step.query, step.key_cache, step.value_cache, *rows)
    torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6, equal_nan=True)
    assert not actual[0].isfinite().all()
    assert actual[1].isfinite().all()


def test_large_scores_do_not_overflow(cpu_kernels):
    step = make_step(random.Random(10), [(90, 1), (0, 50)], head_dim=64, group=2, num_kv_heads=1, block_size=16)
    step.query *= 1000
    step.check(cpu_kernels, tolerance=1e-3)  # scores of thousands: their own rounding is 1e-4


@pytest.mark.parametrize("head_dim", [24, 21])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_store_kv_writes_the_slots_and_nothing_else(cpu_kernels, dtype, cache_dtype, head_dim):
    key, value = torch.randn(2, 5, 6, head_dim).to(dtype)[:, :, 2:5]  # strided tokens
    value[0, 0, :5] = torch.tensor([500.0, -449.0, 0.001, 0.015624, -0.0])  # at the limits of 8-bit floats
    key[1, 1] = 0.0
    storage = write_rows(torch.randn(2, 2, 7, NUM_LAYERS, 4, 3, head_dim), cache_dtype)
    caches = storage[:, :, :, 1]  # (ours, expected) of keys, values
    caches[1].copy_(caches[0])
    slots = torch.tensor([5, -1, 27, 0, 14])
    store_kv(cpu_kernels, key, value, caches[0, 0], caches[0, 1], slots)
    reference.reshape_and_cache(key, value, caches[1, 0], caches[1, 1], slots)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_8_bits_of_bad_values_are_bad_too(cpu_kernels, value, cache_dtype):
    """A NaN stored in 8 bits is read as NaN, and infinity as NaN or the largest number.

    In int8, which has a scale, the whole head becomes NaN. e4m3 has no infinity, so its largest number is stored.
    """
    key = torch.randn(3, 2, 20)
    key[1, 1, 7] = value
    size = row_size(20, cache_dtype)
    caches = torch.zeros(4, 1, 4, 2, size, dtype=torch.uint8).view(cache_dtype)
    slots = torch.tensor([0, 1, 3])
    store_kv(cpu_kernels, key, key, caches[0], caches[1], slots)
    reference.reshape_and_cache(key, key, caches[2], caches[3], slots)
    ours, theirs = (read_rows(cache, torch.float32) for cache in (caches[0], caches[2]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    is_bad = ours.isnan().any(-1)
    assert is_bad.nonzero().tolist() == ([[0, 1, 1]] if cache_dtype == torch.int8 or value != value else [])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_float8_is_widened_exactly(name):
    kernels = load_variant(name)
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    zero_query = torch.zeros(1, 1, 256)
    output = paged_attention(
        kernels, zero_query, torch.zeros_like(codes), codes, torch.zeros(1, 1), [1], [0, 1], Scoring(1.0)
    )
    torch.testing.assert_close(output[0, 0], codes.float()[0, 0, 0], rtol=0, atol=0, equal_nan=True)


def test_attend_stores_before_any_row_reads(cpu_kernels):
    """The second row shares the block that the first row fills in this step."""
    step = make_step(random.Random(11), [(0, 16), (16, 4)], head_dim=32, group=2, num_kv_heads=2, block_size=16)
    step.block_tables[1, 0] = step.block_tables[0, 0]
    table, key = step.block_tables, torch.randn(20, 2, 32)
    value = torch.randn_like(key)
    slots = torch.cat([int(table[0, 0]) * 16 + torch.arange(16), int(table[1, 1]) * 16 + torch.arange(4)])
    step.key_cache.fill_(float("nan"))
    step.value_cache.fill_(float("nan"))
    rows = PagedRows.of(step.query_start_loc, step.seq_lens, table[None], slots[None])
    output = cpu_kernels.attend(rows, Scoring(0.2), step.query, key, value, step.key_cache, step.value_cache)
    expected = reference.paged_attention(
        step.query, step.key_cache, step.value_cache, table, step.seq_lens, step.query_start_loc, Scoring(0.2)
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=4e-6)


# One unit in the last place of the dtype, for values of a few units, where two ways of rounding may differ.
STEP_TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 3.2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (3, 1), (7, 100), (300, 512), (2, 4096)])
def test_norms(cpu_kernels, dtype, num_tokens, size):
    x, update = (3 * torch.randn(2, num_tokens, size)).to(dtype)
    weight = (1 + 0.1 * torch.randn(size)).to(dtype)
    actual, expected = cpu_kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=0, atol=STEP_TOLERANCES[dtype])
    ours, theirs = x.clone(), x.clone()
    actual = cpu_kernels.add_rms_norm(ours, update, weight, 1e-6)
    expected = reference.add_rms_norm(theirs, update, weight, 1e-6)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=STEP_TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 96), (3, 1), (5, 27), (300, 1536)])
def test_silu_mul(cpu_kernels, dtype, num_tokens, size):
    gate_up = (3 * torch.randn(num_tokens, 2 * size)).to(dtype)
    gate_up[0, 0] = -200.0
    gate_up[-1, 0] = 200.0
    gate_up[-1, size] = float("nan")
    actual, expected = cpu_kernels.silu_mul(gate_up), reference.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=0.01 if dtype != torch.float32 else 1e-6, atol=1e-6,
                               equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("is_normalized", "rotates_first"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("head_dim", [2, 16, 38, 64, 80, 128])
def test_norm_rope(cpu_kernels, dtype, is_normalized, rotates_first, head_dim):
    num_tokens, num_heads, num_kv_heads = 9, 6, 2
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = 100 * torch.rand(num_tokens, head_dim // 2)
    cos = torch.cat([angles.cos(), angles.cos()], 1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], 1).to(dtype)
    weights = (1 + 0.1 * torch.randn(2, head_dim)).to(dtype) if is_normalized else (None, None)
    ours, theirs = heads.clone(), heads.clone()
    preparation = NormRopeParams(num_heads, *weights, 1e-6, cos, sin, rotates_first)
    cpu_kernels.norm_rope(ours, preparation)
    reference.norm_rope(theirs, preparation)
    assert torch.equal(ours[:, -num_kv_heads:], heads[:, -num_kv_heads:])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=STEP_TOLERANCES[dtype])


def test_bad_arguments_are_refused(cpu_kernels):
    step = make_step(random.Random(12), [(5, 1)], head_dim=32, group=2, num_kv_heads=2, block_size=16)
    rows = (step.block_tables, step.seq_lens, step.query_start_loc, Scoring(1.0))
    for query, message in (
        (step.query.double(), "query is torch.float64"),
        (step.query[..., :16], "query is"),
        (step.query[:, :3], "3 query heads of 32 over 2 KV heads"),
        (step.query.mT.contiguous().mT, "each token contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(cpu_kernels, query, step.key_cache, step.value_cache, *rows)
    with pytest.raises(ValueError, match="need one block table each"):
        paged_attention(
            cpu_kernels, step.query, step.key_cache, step.value_cache, step.block_tables, [6, 6], [0, 1], Scoring(1.0)
        )
    with pytest.raises(ValueError, match=r"weight is .*must be torch.float32 \(8,\)"):
        cpu_kernels.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"no kernel supports torch.float64"):
        cpu_kernels.silu_mul(torch.ones(2, 8).double())
    large = make_step(random.Random(13), [(5, 1)], head_dim=513, group=1, num_kv_heads=1, block_size=16)
    with pytest.raises(ValueError, match="the head size at most 512"):
        large.check(cpu_kernels)


# Building


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_runs_here_equals_reference(name):
    """Narrower variants run here as they do on processors with fewer features."""
    kernels = load_variant(name)
    assert kernels.variant == name
    for dtypes in DTYPES:
        test_every_head_size(kernels, 1, 80, 2, 2, 16, *dtypes)
        test_every_head_size(kernels, 2, 19, 3, 1, 8, *dtypes)
        test_store_kv_writes_the_slots_and_nothing_else(kernels, *dtypes, 21)
    for dtype in TOLERANCES:
        test_norms(kernels, dtype, 7, 100)
        test_silu_mul(kernels, dtype, 5, 27)
        test_norm_rope(kernels, dtype, True, False, 38)
        test_norm_rope(kernels, dtype, True, True, 38)
    test_windows_read_nothing_before(kernels, 17)
    test_context_is_split_between_threads(kernels, 3, [(2999, 4)], 6)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e-8, 6e-8, 6.1e-5, 3e-5, float("inf")])
def test_portable_conversions_are_those_of_torch(cpu_kernels, value):
    """Every 16-bit float is read from a packed weight, and floats at the limits are written to a cache."""
    for each in (cpu_kernels, load_variant("portable")):
        for dtype in (torch.bfloat16, torch.float16):
            halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 256, 256)
            values = each.lookup_rows(each.pack_linear(StoredWeight(halves[0])), torch.arange(256))
            assert torch.equal(values.nan_to_num(7e8), halves[0].float().nan_to_num(7e8))
            caches = torch.zeros(2, 1, 1, 1, 1, dtype=dtype)
            store_kv(each, *torch.full((2, 1, 1, 1), value), *caches, torch.tensor([0]))
            assert caches.flatten().tolist() == [torch.tensor(value).to(dtype).item()] * 2


@pytest.mark.parametrize("architecture", ["sapphirerapids", "skylake-avx512"])
def test_wider_variants_compile(cpu_kernels, architecture):
    """Variants that this machine may not be able to run are checked for syntax and types.

    A platform's wheel contains every variant.
    """
    command = [*first_compiler().command, *FLAGS, f"-march={architecture}", "-Wno-psabi", "-Wall", "-Werror"]
    command += ["-fsyntax-only", *map(str, sources())]
    environ = {**os.environ, "LC_ALL": "C"}  # compilers use the user's language
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if "bad value" in done.stderr or "unsupported" in done.stderr or "unknown target" in done.stderr:
        pytest.skip(f"the compiler does not know {architecture}")
    assert done.returncode == 0, done.stderr


def test_library_is_built_once_and_again_for_other_flags(cpu_kernels, tmp_path, monkeypatch):
    """The library has only a few lines, because its content does not matter."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "sum.c").write_text("int sum(int a, int b) { return a + b; }\n")
    monkeypatch.setattr(library, "SOURCES", tmp_path / "source")
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    compiler = tmp_path / "compiler"
    log = tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shlex.join(first_compiler().command)} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build, flags = environment_build(), flags_of("portable")
    path = build_library(build, flags)
    assert build_library(build, flags) == path
    assert path.is_relative_to(tmp_path / "kernels")
    assert build_library(build, [*flags, "-g0"]) != path
    builds = [line for line in log.read_text().splitlines() if "-shared" in line and "trial" not in line]
    assert not [line for line in builds if "-fopenmp" in line]  # torch provides the runtime
    assert len(builds) == 2
    assert list(path.parent.iterdir()) == [path]


def test_tests_have_every_variant_built_that_of_this_processor_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    # A build only needs the file named after -o.
    touch = 'while [ $# != 0 ]; do [ "$1" != -o ] || : >"$2"; shift; done'
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{touch}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    build_variants()
    commands = [line for line in log.read_text().splitlines() if " -c " in line and "trial" not in line]
    variants = variants_of(platform.machine())
    assert len(commands) == len(set(commands)) == len(variants) * len(sources())
    assert commands[0].startswith(" ".join(flags_of(choose_variant(environment_build().variant))))
    build_variants()
    assert len([line for line in log.read_text().splitlines() if "-shared" in line]) == 2 * len(variants)


# In a separate process, which a missing instruction would end.
LOADING = """
import logging, random, sys
from pathlib import Path
from pagewire.kernels.cpu import library
from tests.kernels.damage import damaged
folder = Path(sys.argv[1])
library.SOURCES, library.BUILT = folder / "source", folder / "built"
logging.basicConfig(stream=sys.stdout, format="%(message)s")
build = library.Build("portable", cache=folder / "cache")
path = library.build_library(build, library.flags_of("portable"))
good = path.read_bytes()
for seed in range(12):
    path.unlink()  # what is loaded already stays what it is
    path.write_bytes(damaged(good, random.Random(seed)))
    functions, _ = library.load_library(build)
    print(seed, functions.sampling_scratch_size(seed), path.read_bytes() == good, flush=True)
"""


def test_a_damaged_library_is_built_again(tmp_path):
    """The damage is logged, and the process that finds it continues. The same holds for a library of a wheel."""
    skip_without_compiler()
    (tmp_path / "source").mkdir()
    (tmp_path / "built").mkdir()
    for name in ("abi.h", "abi.c"):
        shutil.copy(library.SOURCES / name, tmp_path / "source")
    answer = '#include "abi.h"\nint64_t sampling_scratch_size(int64_t size) { return size + 42; }\n'
    (tmp_path / "source" / "answer.c").write_text(answer)
    (tmp_path / "built" / "portable.so").write_text("\x7fELF")
    command = [sys.executable, "-W", "ignore", "-c", LOADING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line[0].isdigit()] == [f"{seed} {seed + 42} True" for seed in range(12)]
    assert sum("is damaged: building it again" in line for line in lines) == 12


@pytest.fixture
def fresh_switch():
    """The state of a process that has not tried to load the kernels yet."""
    pagewire.kernels.cpu.load_kernels.cache_clear()
    yield
    pagewire.kernels.cpu.load_kernels.cache_clear()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PAGEWIRE_CPU_KERNELS": "off"}, "None, 0 warnings"),
        ({"CC": "no-such-compiler"}, "None, 1 warnings"),
        ({"CC": "/bin/false"}, "None, 1 warnings"),
        ({"CC": "no-such-compiler", "PAGEWIRE_CPU_KERNELS": "off"}, "None, 0 warnings"),
        (
            {"CC": "no-such-compiler", "PAGEWIRE_CPU_KERNELS": "require"},
            "ValueError: PAGEWIRE_CPU_KERNELS is require: there is no C compiler",
        ),
        ({"CC": "/bin/false", "PAGEWIRE_CPU_KERNELS": "require"}, "failed with 1"),
        ({"PAGEWIRE_CPU_KERNELS": "on"}, "ValueError: PAGEWIRE_CPU_KERNELS is 'on'; it must be one of auto, off"),
        (
            {"PAGEWIRE_CPU_VARIANT": "sse2", "PAGEWIRE_CPU_KERNELS": "off"},
            "ValueError: PAGEWIRE_CPU_VARIANT is 'sse2'; it must be one of native, portable, avx2, avx512, "
            "avx512_bf16, amx_int8",
        ),
    ],
)
def test_switch(environ, expected, tmp_path, monkeypatch, caplog, fresh_switch):
    """The path has no compiler."""
    defaults = {"PAGEWIRE_CACHE": str(tmp_path), "PAGEWIRE_CPU_KERNELS": "auto", "PAGEWIRE_CPU_VARIANT": "native"}
    defaults["PATH"] = str(tmp_path)
    for name, value in {**defaults, **environ}.items():
        monkeypatch.setenv(name, value)
    try:
        loaded = [load_cpu_kernels(), load_cpu_kernels()]
        outcome = f"{loaded[1]}, {len(caplog.records)} warnings"
    except ValueError as error:
        outcome = f"{type(error).__name__}: {error}"
    assert expected in outcome


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, caplog, fresh_switch):
    """A container may run under a user id without a user, and therefore without a home directory."""
    skip_without_compiler()

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "PAGEWIRE_CACHE", "PAGEWIRE_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert load_cpu_kernels() is None
    (line,) = caplog.messages
    assert line.endswith("there is no cache folder, because this user has no home; set PAGEWIRE_CACHE to a folder")


def test_the_variant_is_chosen_by_name(monkeypatch, fresh_switch):
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    monkeypatch.setenv("PAGEWIRE_CPU_VARIANT", "portable")
    assert load_cpu_kernels().variant == "portable"
    # "native" is the widest variant that this processor can run.
    monkeypatch.setenv("PAGEWIRE_CPU_VARIANT", "native")
    assert load_cpu_kernels().variant == [name for name in VARIANTS if set(VARIANTS[name]) <= library._features()][-1]


@pytest.mark.parametrize(
    ("features", "missing"), [("sse2", "avx2, f16c, fma"), ("avx2 fma f16c avx512f avx512bw avx512vl", "avx512dq")]
)
def test_a_variant_that_would_not_run_is_refused(features, missing, monkeypatch, caplog, fresh_switch):
    """The refusal comes before any build: a missing instruction would end the process."""
    monkeypatch.setattr(library, "_features", lambda: frozenset(features.split()))
    variant = "avx512" if "avx2" in features else "avx2"
    monkeypatch.setenv("PAGEWIRE_CPU_VARIANT", variant)
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    reason = f"this processor does not run the variant {variant}: it has no {missing}"
    with pytest.raises(ValueError, match=f"^PAGEWIRE_CPU_KERNELS is require: {reason}$"):
        load_cpu_kernels()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "auto")
    assert load_cpu_kernels() is None
    assert caplog.messages == [f"computing in plain torch, without the CPU kernels: {reason}"]
