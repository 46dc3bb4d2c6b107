"""`pagewire.kernels.triton.prefill_attention` compared with its specification.

Features are tested alone and in pairs, and lengths at every edge.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import triton.language as tl

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import attention_arguments, prefill_attention
from pagewire.kernels.triton.tiles import Tile
from pagewire.network.operations import BlockPattern
from testing.kernel_checks.prefill_attention import E4M3, Case, check_paged_prefill, make_batch

TILE = Tile(block_n=16, num_warps=4, num_stages=2, block_m=16)
# Chunks after a prefix that ends within a block, in one and in two tiles of queries, and padding.
CASE = Case(((3, 22), (9, 17), (1, 0)), num_kv_heads=2, num_groups=2)
FEATURES = {
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "8-bit": {"cache_dtype": E4M3},
    "head_dim 80": {"head_dim": 80},
    "3 groups": {"num_groups": 3},
    "blocks of 48": {"block_size": 48},
    "head-major": {"is_head_major": True},
    "window": {"window": 6},
    "softcap": {"softcap": 2.0},
    "alibi": {"has_alibi": True},
    "sinks": {"has_sinks": True},
    "pattern": {"pattern": BlockPattern(8, 1, 3, 1, 1)},
    "shared": {"is_shared": True},
}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if pair != ("float16", "bfloat16")]


def test_plain(device):
    check_paged_prefill(device, CASE, TILE)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(device, feature):
    check_paged_prefill(device, replace(CASE, **FEATURES[feature]), TILE)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_pair_of_features(device, one, other):
    case = replace(CASE, **FEATURES[one], **FEATURES[other], seed=PAIRS.index((one, other)))
    check_paged_prefill(device, case, TILE)


def test_all_features_at_once(device):
    changes = {name: value for feature in FEATURES.values() for name, value in feature.items()}
    check_paged_prefill(device, replace(CASE, **changes), TILE)


@pytest.mark.parametrize("window", [0, 1, 16, 17])
@pytest.mark.parametrize("prefix", [0, 15, 16, 17, 32])
def test_every_edge_of_a_block(device, prefix, window):
    rows = tuple((num_queries, prefix + num_queries) for num_queries in (1, 15, 16, 17))
    case = Case(rows, num_kv_heads=1, num_groups=1, window=window, seed=prefix)
    check_paged_prefill(device, case, TILE)


@pytest.mark.parametrize("tile", [Tile(32, 4, 2, 16), Tile(16, 4, 2, 64), Tile(64, 4, 2, 32), None], ids=str)
@pytest.mark.parametrize("window", [0, 21])
def test_every_tile(device, tile, window):
    check_paged_prefill(device, Case(((40, 90), (33, 33)), num_kv_heads=1, num_groups=3, window=window), tile)


@pytest.mark.parametrize("num_groups", [1, 4, 5, 7, 8, 16, 20, 71])
def test_every_number_of_groups(device, num_groups):
    check_paged_prefill(device, Case(((6, 20), (3, 3)), num_kv_heads=1, num_groups=num_groups, has_alibi=True), TILE)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 112, 128, 256, 320, 512])
def test_every_head_dim(device, head_dim):
    check_paged_prefill(device, Case(((9, 20),), num_kv_heads=1, head_dim=head_dim, softcap=4.0), TILE)


@pytest.mark.parametrize("block_size", [8, 24, 32, 128, 240, 256])
@pytest.mark.parametrize("pattern", [None, BlockPattern(16, 1, 2, 1, 1)])
def test_every_block_size(device, block_size, pattern):
    rows = ((7, block_size + 3), (2, block_size))
    case = Case(rows, num_kv_heads=1, block_size=block_size, pattern=pattern, seed=block_size)
    check_paged_prefill(device, case, replace(TILE, block_n=64))


@pytest.mark.parametrize("seed", range(6))
def test_patterns_at_every_edge_of_their_blocks(device, seed):
    """Tiles of queries and keys begin and end within blocks of the pattern, and contain several of them."""
    rows = ((9, 64 + seed), (40, 71 + seed), (8 * seed + 1, 8 * seed + 1))
    pattern = BlockPattern(8, 1 + seed % 2, 3 + seed, seed, seed % 3)
    check_paged_prefill(device, replace(CASE, rows=rows, pattern=pattern, seed=seed), TILE)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_bfloat16_queries_as_float16_operands(device, monkeypatch, factor):
    """Queries beyond the range of float16 become float16 operands, as on a device with 8-bit caches."""
    monkeypatch.setattr(attention_arguments, "operand", lambda *_: tl.float16)
    case = Case(((9, 20), (2, 17)), torch.bfloat16, E4M3, query_factor=factor)
    check_paged_prefill(device, case, TILE)


def test_rows_of_a_mixed_batch(device):
    """The first two rows belong to another launch."""
    rows = ((1, 30), (1, 17), (12, 20), (9, 9), (1, 0))
    for changes in ({}, FEATURES["pattern"]):
        check_paged_prefill(device, replace(CASE, rows=rows, num_skipped=2, **changes), TILE)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_every_number_of_rows(device, num_rows):
    """The tiles of each row must be found, also beside rows without queries and padding."""
    rows = tuple(itertools.islice(itertools.cycle([(3, 5), (0, 7), (20, 20), (1, 0), (8, 8)]), num_rows))
    check_paged_prefill(device, Case(rows, num_kv_heads=1), TILE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # to infinity, where tanh is 1
def test_large_scores_do_not_overflow(device):
    batch = make_batch(CASE, device)
    integers = {"device": device, "dtype": torch.int32}
    output = prefill_attention.paged_prefill(
        batch.query * 1e3,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        torch.tensor(batch.seq_lens, **integers),
        torch.tensor(batch.query_start_loc, **integers),
        Scoring(1.0, softcap=30.0),
    )
    assert output.isfinite().all()


def test_no_rows_write_nothing(device):
    batch = make_batch(CASE, device)
    output = torch.full_like(batch.query, 7.0)
    none, starts = torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    prefill_attention.paged_prefill(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables[:0],
        none,
        starts,
        Scoring(1.0),
        output=output,
    )
    assert (output == 7.0).all()


def refusals():
    batch = make_batch(CASE, torch.device("cpu"))
    seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
    good = {
        **{"query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache},
        **{"block_tables": batch.block_tables, "seq_lens": seq_lens, "scoring": Scoring(1.0)},
        "query_start_loc": torch.tensor(batch.query_start_loc, dtype=torch.int32),
    }
    query, cache = batch.query, batch.key_cache
    yield r"need \[tokens, a multiple of 2 heads, 32\]", good | {"query": query[:, :3]}
    yield r"need \[tokens, a multiple of 2 heads, 32\]", good | {"query": query[..., :16]}
    yield "130 query heads of 32 share a KV head; make it 1 to 128", good | {"query": query.repeat(1, 65, 1)}
    yield "queries are torch.float16 and the caches torch.float32", good | {"query": query.half()}
    yield "queries are torch.float64", good | {"query": query.double()}
    yield "its last dimension dense", good | {"query": query.mT.contiguous().mT}
    yield "output is", good | {"output": query[:3]}
    yield "value_cache is", good | {"value_cache": cache[:2]}
    yield r"block_tables is .* torch.int64", good | {"block_tables": batch.block_tables.long()}
    yield r"seq_lens is \[3\] torch.int64", good | {"seq_lens": seq_lens.long()}
    yield r"query_start_loc is \[3\] .* make it \[4\]", good | {"query_start_loc": seq_lens}
    yield r"alibi_slopes is \[3\] torch.float32", good | {"scoring": Scoring(1.0, alibi_slopes=torch.ones(3))}
    yield r"sinks is \[3\] torch.float32 .* make it \[4\]", good | {"scoring": Scoring(1.0, sinks=torch.ones(3))}
    yield "scale is 0.0; it must be greater than 0", good | {"scoring": Scoring(0.0)}
    yield "window is -1 and softcap 0.0; neither", good | {"scoring": Scoring(1.0, window=-1)}
    yield "window is 0 and softcap -1.0; neither", good | {"scoring": Scoring(1.0, softcap=-1.0)}


@pytest.mark.parametrize(("text", "arguments"), [*refusals()], ids=lambda case: case if isinstance(case, str) else "")
def test_refuses(text, arguments):
    with pytest.raises(ValueError, match=text):
        prefill_attention.paged_prefill(**arguments)
