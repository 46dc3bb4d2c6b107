"""`pagewire.kernels.triton.decode_attention` compared with its specification."""

import dataclasses
import itertools
import random

import pytest
import torch

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import decode_attention, tiles
from pagewire.network.operations import BlockPattern
from testing.kernel_checks.decode_attention import (
    E4M3,
    VERSIONS,
    Step,
    check_decode,
    check_large_queries,
    compare,
    make_inputs,
    make_plan,
    run_version,
    specify,
)

FEATURES = {
    "window": {"window": 18},
    "alibi": {"has_alibi": True},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "quantized": {"cache_dtype": E4M3},
    "pattern": {"pattern": BlockPattern(8, 1, 3, 1, 1)},
}
PAIRS = [*itertools.combinations(FEATURES, 1), *itertools.combinations(FEATURES, 2), tuple(FEATURES)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = Step((33, 0, 17), num_kv_heads=2, num_groups=2)


@pytest.fixture(autouse=True)
def small_tiles():
    """Use small tiles: several in a short row, and rows that end within a tile."""
    tile = tiles.Tile(block_n=16, num_warps=4, num_stages=2)
    with tiles.forced("paged_attention_v1", tile), tiles.forced("paged_attention_v2", tile):
        yield


def features(names):
    return {key: value for name in names for key, value in FEATURES[name].items()}


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_features_alone_in_pairs_and_together(device, names):
    check_decode(device, dataclasses.replace(STEP, **features(names)))


@pytest.mark.parametrize("names", [(), *PAIRS[: len(FEATURES)], tuple(FEATURES)], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_in_half_precision(device, dtype, names):
    step = dataclasses.replace(STEP, seq_lens=(21, 0), num_kv_heads=1, dtype=dtype, **features(names))
    check_decode(device, step)


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("window", [0, 1, 16, 17])
def test_lengths_on_every_edge(device, block_size, window):
    """Lengths at the edges of a tile, a block and a split; two rows begin with the same block."""
    lens = {1, 2, 15, 16, 17, block_size - 1, block_size, block_size + 1}
    step = Step((*sorted(lens), 0), num_kv_heads=1, num_groups=1, block_size=block_size, window=window)
    check_decode(device, step, seed=block_size + window)


@pytest.mark.parametrize("num_groups", [1, 3, 16])
@pytest.mark.parametrize("layout", ["block_major", "head_major"])
def test_group_ratios(device, num_groups, layout):
    check_decode(device, Step((20, 5), num_kv_heads=2, num_groups=num_groups, layout=layout))


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256, 320, 512])
def test_head_dimensions(device, head_dim, cache_dtype):
    step = Step((18,), num_kv_heads=1, head_dim=head_dim, dtype=torch.float16, cache_dtype=cache_dtype)
    check_decode(device, step, seed=head_dim)


@pytest.mark.parametrize("block_n", [32, 64])
@pytest.mark.parametrize("block_size", [16, 256])
def test_tiles_beside_blocks(device, block_n, block_size):
    """A tile may contain several blocks, and a block several tiles."""
    step = Step((70, 9), num_kv_heads=1, block_size=block_size, pattern=BlockPattern(24, 1, 2, 1, 1))
    tile = tiles.Tile(block_n, 4, 2)
    with tiles.forced("paged_attention_v1", tile), tiles.forced("paged_attention_v2", tile):
        check_decode(device, step, seed=block_n)
        check_decode(device, dataclasses.replace(step, pattern=None, window=30), seed=block_n)


def test_splits_without_a_position(device):
    """Rows are split by length. If a pattern has few blocks, the queries attend to nothing in some splits."""
    step = Step((70, 80), num_kv_heads=2, num_groups=1, pattern=BlockPattern(16, 1, 9, 1, 1), num_programs=64)
    inputs, plan = make_inputs(step, device, seed=3), make_plan(step, device)
    plan.decide(inputs.seq_lens)
    assert (plan.split_starts.diff() > 3).all()  # a head attends to its own block and at most one other
    check_decode(device, step, ["v2"], seed=3)


@pytest.mark.parametrize("seq_len", [1, 7, 8, 9, 16, 17, 32, 33, 40, 41, 71, 72, 73])
def test_patterns_at_every_edge_of_their_blocks(device, seq_len):
    """Blocks of a pattern and blocks of the cache have different edges."""
    pattern = BlockPattern(8, 2, 5, 1 + seq_len, 2)
    check_decode(device, Step((seq_len, 73), num_groups=3, pattern=pattern), seed=seq_len)


def test_more_splits_than_the_reduction_adds_up_at_once(device):
    """Scores rise with the position, so that the highest score is found late."""
    step = Step((330,), num_kv_heads=1, num_groups=2, num_programs=128, has_alibi=True)
    inputs, plan = make_inputs(step, device, seed=0), make_plan(step, device)
    plan.decide(inputs.seq_lens)
    assert plan.split_starts[1] > decode_attention.REDUCTION_TILE
    check_decode(device, step, ["v2"])


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_rows_alone_give_zeros(device, version):
    step = Step((0, 0, 0), num_kv_heads=1)
    inputs = make_inputs(step, device, seed=0)
    inputs.block_tables.fill_(-1)
    assert run_version(version, step, inputs).eq(0).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_without_rows(device, version):
    inputs = make_inputs(STEP, device, seed=0)
    rows = {name: getattr(inputs, name)[:0] for name in ("query", "block_tables", "seq_lens")}
    empty = dataclasses.replace(inputs, **rows)
    assert run_version(version, dataclasses.replace(STEP, seq_lens=()), empty).shape == (0, 4, 32)


@pytest.mark.parametrize("version", VERSIONS)
def test_bad_numbers_that_are_read_are_not_hidden(device, version):
    step = Step((40, 40), num_kv_heads=2, num_groups=2, shares_prefix=False)
    inputs = make_inputs(step, device, seed=0)
    expected, limit = specify(inputs, step)
    inputs.value_cache[inputs.block_tables[1, 1].item(), 3, 1] = float("nan")
    actual = run_version(version, step, inputs)
    assert actual[1, 2:].isnan().all()
    actual[1, 2:], expected[1, 2:] = 0.0, 0.0
    compare(actual, expected, limit, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_large_scores_under_a_cap_stay_finite(device, version):
    step = Step((20,), num_kv_heads=1, softcap=0.5)
    inputs = make_inputs(step, device, seed=0)
    inputs = dataclasses.replace(inputs, query=inputs.query * 1e4)
    expected, limit = specify(inputs, step)
    compare(run_version(version, step, inputs), expected, limit, version)


def test_queries_beyond_float16(device):
    check_large_queries(device, Step((20,), num_kv_heads=1, dtype=torch.bfloat16, cache_dtype=E4M3))


@pytest.mark.parametrize("version", VERSIONS)
def test_results_go_where_they_are_wanted(device, version):
    """The decoding rows of a mixed batch write to the first rows of its output, and not beyond a head."""
    step = Step((20, 5), num_kv_heads=2, head_dim=24)
    inputs = make_inputs(step, device, seed=0)
    expected, limit = specify(inputs, step)
    wide = torch.full((3, 2, 4, 32), 7.0, device=device)
    inputs = dataclasses.replace(inputs, output=wide[:2, 1, :, :24])
    actual = run_version(version, step, inputs)
    assert actual.data_ptr() == wide[:, 1].data_ptr()
    compare(wide[:2, 1, :, :24], expected, limit, version)
    assert wide[:, 0].eq(7).all()
    assert wide[:, 1, :, 24:].eq(7).all()
    assert wide[2].eq(7).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_block_beyond_32_bits_of_elements_is_found(device, tmp_path, version):
    distance, storage = 2**30 + 64, None
    if device.type == "cuda":
        storage = torch.empty(2 * distance + 512, dtype=torch.int8, device=device)
    else:  # only the touched parts of it use memory
        storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * distance + 512, dtype=torch.int8)
    caches = storage.view(E4M3).as_strided((3, 16, 1, 32), (distance, 32, 32, 1))
    step = Step((16,), num_kv_heads=1, cache_dtype=E4M3, shares_prefix=False)
    inputs = make_inputs(step, device, seed=0)
    caches[2] = inputs.value_cache[inputs.block_tables[0, 0].item()]
    table = torch.full_like(inputs.block_tables, 2)
    inputs = dataclasses.replace(inputs, key_cache=caches, value_cache=caches, block_tables=table)
    expected, limit = specify(inputs, step)
    compare(run_version(version, step, inputs), expected, limit, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_groups": num_groups, "num_kv_heads": 1} for num_groups in (20, 24, 32, 64, 71, 128)),
        {"block_size": 8},
        {"block_size": 24, "window": 30},
        {"head_dim": 16},
        {"head_dim": 16, "dtype": torch.bfloat16, "cache_dtype": E4M3, "block_size": 8, "num_groups": 20},
    ],
    ids=str,
)
def test_many_heads_small_blocks_and_small_heads(device, version, sizes):
    check_decode(device, Step((70, 1, 0, 133), **sizes), [version])


# Split plans


def spelled_out(seq_lens, max_positions, num_full_splits, min_chunk):
    lens = [min(seq_len, max_positions) for seq_len in seq_lens]
    chunk = max(-(-sum(lens) // num_full_splits), min_chunk)
    alignment = min(64, min_chunk)
    chunk = -(-chunk // alignment) * alignment
    of_processor = -(-sum(lens) // max(num_full_splits // 4, 1)) // alignment * alignment
    chunk = max(chunk, min(of_processor, 4 * min_chunk))
    counts = [-(-seq_len // chunk) for seq_len in lens]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    return [0, *itertools.accumulate(counts)], rows


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_as_spelled_out(device, seed):
    draw = random.Random(seed)
    num_rows = draw.choice([1, 2, 7, 127, 128, 129, 300])
    seq_lens = [draw.choice([0, 1, draw.randrange(100), draw.randrange(40_000)]) for _ in range(num_rows)]
    min_chunk, num_programs = draw.choice([16, 64, 256]), draw.choice([8, 64, 528])
    max_positions = draw.choice([decode_attention.ANY_LEN, 1000])
    plan = decode_attention.SplitPlan.allocate(num_rows, 16, 8, 32, device, num_programs, min_chunk)
    plan.decide(torch.tensor(seq_lens, dtype=torch.int32, device=device), max_positions)
    starts, rows = spelled_out(seq_lens, max_positions, plan.num_full_splits, min_chunk)
    padding = [-1] * (len(plan.split_rows) - len(rows))
    assert plan.split_starts.tolist() == starts, f"seed {seed}"
    assert plan.split_rows.tolist() == rows + padding, f"seed {seed}"


def test_splits_are_even_whatever_the_mixture(device):
    plan = decode_attention.SplitPlan.allocate(256, 32, 8, 128, device, num_programs=528)
    seq_lens = torch.full((256,), 100, dtype=torch.int32, device=device)
    seq_lens[77] = 40_000
    plan.decide(seq_lens)
    starts = plan.split_starts.tolist()
    assert starts[78] - starts[77] == -(-40_000 // 1024)  # 65,500 positions / 66, rounded up by 64
    assert starts[-1] - 256 + 1 == starts[78] - starts[77]


@pytest.mark.parametrize(
    ("seq_len", "num_rows", "num_programs"),
    [(257, 1, 40), (512, 1, 64), (1024, 1, 128), (1100, 1, 144), (4096, 1, 128), (1024, 4, 128), (32_768, 1, 512)],
)
def test_short_rows_fill_the_processors(device, seq_len, num_rows, num_programs):
    """With 132 processors and 8 KV heads, each processor runs one program until splits have 256 positions.

    After that, it runs up to four.
    """
    plan = decode_attention.SplitPlan.allocate(num_rows, 32, 8, 128, device, num_programs=4 * 132)
    plan.decide(torch.full((num_rows,), seq_len, dtype=torch.int32, device=device))
    assert plan.split_starts[-1].item() * 8 == num_programs


@pytest.mark.parametrize("seq_len", [257, 1024, 1100])
def test_splits_of_one_tile_add_up(device, seq_len):
    step = Step((seq_len,), num_kv_heads=2, num_programs=2 * 66, min_chunk=decode_attention.MIN_CHUNK)
    plan = make_plan(step, device)
    plan.decide(torch.tensor(step.seq_lens, dtype=torch.int32, device=device))
    assert plan.split_starts[-1] == -(-seq_len // 64)
    check_decode(device, step, ["v2"])


def test_when_splits_are_preferred():
    prefers = decode_attention.prefers_splits
    assert prefers(1, 8, 257, 257, 132)
    assert prefers(1, 8, 32_768, 32_768, 132)
    assert prefers(32, 8, 32 * 2048, 2048, 132)
    assert not prefers(64, 8, 64 * 2048, 2048, 132)
    assert prefers(64, 8, 63 * 600 + 32_768, 32_768, 132)
    assert not prefers(1, 8, 256, 256, 132)
    assert not prefers(0, 8, 0, 0, 132)


# Refusals


def refusals():
    integers = {"dtype": torch.int32}
    yield "queries are \\[3, 4, 16\\]", {"query": torch.zeros(3, 4, 16)}
    yield "queries are \\[3, 3, 32\\]", {"query": torch.zeros(3, 3, 32)}
    yield "130 query heads of 32 share a KV head", {"query": torch.zeros(3, 260, 32)}
    yield "queries are torch.float16 and the caches torch.float32", {"query": torch.zeros(3, 4, 32).half()}
    yield "query is .* its last dimension dense", {"query": torch.zeros(3, 4, 32, 3)[..., 0]}
    yield "output is \\[3, 4, 32\\] torch.float16", {"output": torch.zeros(3, 4, 32).half()}
    yield "value_cache is \\[2, 16, 2, 64\\]", {"value_cache": torch.zeros(2, 16, 2, 64)}
    yield "block_tables is \\[2, 9\\]", {"block_tables": torch.zeros(2, 9, **integers)}
    yield "seq_lens is \\[3\\] torch.int64", {"seq_lens": torch.zeros(3, dtype=torch.int64)}
    slopes = torch.zeros(2)
    yield "alibi_slopes is \\[2\\] torch.float32 .* make it \\[4\\]", {"scoring": Scoring(1.0, alibi_slopes=slopes)}
    yield "sinks is \\[4\\] torch.float64 .* make it", {"scoring": Scoring(1.0, sinks=torch.zeros(4).double())}
    yield "scale is 0.0", {"scoring": Scoring(0.0)}
    yield "window is -1", {"scoring": Scoring(1.0, -1)}


@pytest.mark.parametrize(("text", "changes"), [*refusals()], ids=lambda case: case if isinstance(case, str) else "")
@pytest.mark.parametrize("version", VERSIONS)
def test_refuses(version, text, changes):
    inputs = make_inputs(STEP, torch.device("cpu"), seed=0)
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", "scoring")
    arguments = {name: getattr(inputs, name) for name in names} | changes
    if version == "v2":
        arguments["plan"] = make_plan(STEP, torch.device("cpu"))
    with pytest.raises(ValueError, match=text):
        getattr(decode_attention, f"paged_attention_{version}")(**arguments)


def test_a_plan_refuses_other_rows():
    cpu = torch.device("cpu")
    inputs, plan = make_inputs(STEP, cpu, seed=0), make_plan(dataclasses.replace(STEP, num_groups=1), cpu)
    with pytest.raises(ValueError, match=r"the plan is for \[3, 2, 32\]"):
        decode_attention.paged_attention_v2(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.block_tables,
            inputs.seq_lens,
            plan,
            Scoring(1.0),
        )
    with pytest.raises(ValueError, match=r"make it \[3\] torch\.int32"):
        plan.decide(inputs.seq_lens[:2])
    with pytest.raises(ValueError, match="max_positions is 0"):
        plan.decide(inputs.seq_lens, 0)


@pytest.mark.parametrize(("num_programs", "min_chunk"), [(0, 16), (-1, 16), (4, 0), (4, 40)])
def test_a_plan_refuses_bad_numbers(num_programs, min_chunk):
    with pytest.raises(ValueError, match=r"make it (at least 1|a multiple of 16)"):
        decode_attention.SplitPlan.allocate(1, 1, 1, 32, torch.device("cpu"), num_programs, min_chunk)


def test_plan_of_first_rows_shares_memory_and_refuses_more(device):
    whole = decode_attention.SplitPlan.allocate(5, 4, 2, 32, device, num_programs=8)
    seq_lens = torch.tensor([700, 3, 0], dtype=torch.int32, device=device)
    part, fresh = whole.of_first(3), decode_attention.SplitPlan.allocate(3, 4, 2, 32, device, num_programs=8)
    part.decide(seq_lens)
    fresh.decide(seq_lens)
    assert torch.equal(part.split_starts, fresh.split_starts)
    assert torch.equal(part.split_rows, fresh.split_rows)
    assert part.sums.shape == fresh.sums.shape
    assert part.sums.data_ptr() == whole.sums.data_ptr()
    with pytest.raises(ValueError, match="num_rows is 6, but the plan has memory for 0 to 5"):
        whole.of_first(6)
