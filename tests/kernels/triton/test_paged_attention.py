"""`pagewire.kernels.triton.paged_attention`: rows in a mixed batch give the same results as alone."""

import itertools
from dataclasses import replace

import pytest
import torch

from pagewire.kernels import reference
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.attention_arguments import AlikeLayers, paged_caches
from pagewire.kernels.triton.decode_attention import SplitPlan
from pagewire.kernels.triton.paged_attention import PagedAttention
from pagewire.network.operations import BlockPattern
from testing.kernel_checks.prefill_attention import E4M3, Case, check_paged_attention, compare, make_batch
from testing.kernels.recorded_launches import record_attention

CASE = Case(((1, 40), (1, 17), (1, 0), (12, 20), (9, 9), (1, 5)), num_kv_heads=2, num_groups=2)
FEATURES = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "8-bit": {"cache_dtype": E4M3},
    "window": {"window": 6},
    "softcap": {"softcap": 2.0},
    "alibi": {"has_alibi": True},
    "pattern": {"pattern": BlockPattern(8, 1, 3, 1, 1)},
    "shared": {"is_shared": True},
    "head-major": {"is_head_major": True},
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(device, feature, splits):
    check_paged_attention(device, replace(CASE, **FEATURES[feature]), 3, splits=splits)


@pytest.mark.parametrize(("num_decodes", "splits"), list(itertools.product([0, 1, 2, 3], [False, True])))
def test_every_share_of_rows_that_decode(device, num_decodes, splits):
    """A row with one query may also be computed with the prefill rows."""
    check_paged_attention(device, CASE, num_decodes, splits=splits and num_decodes > 0)


@pytest.mark.parametrize("splits", [False, True])
def test_each_part_has_its_own_launch(device, monkeypatch, splits):
    """Any of the three kernels would compute the right result; the test checks which one is launched."""
    launched = record_attention(monkeypatch)
    check_paged_attention(device, CASE, 3, splits=splits)
    tile = tiles.lookup("paged_prefill", head_dim=CASE.head_dim, num_groups=2, dtype=CASE.dtype)
    prefill = ("paged_prefill", (22 // (tile.block_m // 2) + 3, 2, 1))
    # Grid by KV heads: three rows, or 32 splits plus the number of rows.
    assert launched == [
        ("paged_attention_v2", (2, 32 + 3, 1)) if splits else ("paged_attention_v1", (2, 3, 1)),
        prefill,
    ]


@pytest.mark.parametrize("splits", [False, True])
def test_layers_are_launched_with_what_is_theirs(device, splits):
    """Layers that are alike differ in queries, caches, sinks and strides. Each gets the same result as alone."""
    cases = [replace(CASE, seed=seed, has_sinks=seed == 1, is_head_major=seed == 2) for seed in range(3)]
    batches = [make_batch(case, device) for case in cases]
    first, integers = batches[0], {"dtype": torch.int32, "device": device}
    caches = [paged_caches(batch.key_cache, batch.value_cache) for batch in batches]
    layers = AlikeLayers.of(first.query.shape, first.query.dtype, caches[0], first.scoring)
    seq_lens, starts = torch.tensor(first.seq_lens, **integers), torch.tensor(first.query_start_loc, **integers)
    plan = None
    if splits:
        plan = SplitPlan.allocate(3, 4, 2, 32, device, num_programs=64, min_chunk=16)
        plan.decide(seq_lens[:3])
    # All layers use the rows and blocks of the first layer, with content of their own in them.
    attention = PagedAttention.of(layers, first.block_tables, seq_lens, starts, 3, plan)
    for batch, cache in zip(batches, caches, strict=True):
        keys, values = batch.key_cache.nan_to_num(0.5), batch.value_cache.nan_to_num(0.5)
        batch.key_cache.copy_(keys)
        batch.value_cache.copy_(values)
        rows = (first.block_tables, first.seq_lens, first.query_start_loc)
        expected = reference.paged_attention(batch.query, keys, values, *rows, batch.scoring)
        output = torch.full_like(batch.query, 7.0)
        returned = attention.attend(batch.query, cache, batch.scoring.sinks, output)
        assert returned.data_ptr() == output.data_ptr()
        compare(output, expected, batch, f"{splits=}")


def test_layers_that_differ_from_their_group_are_refused(device):
    batch = make_batch(CASE, device)
    caches = paged_caches(batch.key_cache, batch.value_cache)
    layers = AlikeLayers.of(batch.query.shape, batch.query.dtype, caches, batch.scoring)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    attention = PagedAttention.of(layers, batch.block_tables[:0], starts[:0], starts, 0, None)
    with pytest.raises(ValueError, match=r"query is \[23, 4, 32\] .* make it \[25, 4, 32\] torch.float32"):
        attention.attend(batch.query[2:], caches)
    with pytest.raises(ValueError, match=r"query is \[25, 4, 32\] torch.float16 .* make it"):
        attention.attend(batch.query.half(), caches)
    for others in (batch.key_cache[1:], batch.key_cache[:, :8], batch.key_cache.to(E4M3)):
        with pytest.raises(ValueError, match=r"the caches are .* these layers were prepared for"):
            attention.attend(batch.query, paged_caches(others, others))
    with pytest.raises(ValueError, match=r"sinks is \[3\] torch.float32 .* make it \[4\]"):
        attention.attend(batch.query, caches, torch.zeros(3, device=device))
    with pytest.raises(ValueError, match="output is"):
        attention.attend(batch.query, caches, output=batch.query[:3])


def test_rows_that_all_decode(device):
    check_paged_attention(device, replace(CASE, rows=CASE.rows[:3]), 3, splits=True)


@pytest.mark.parametrize("num_decodes", [-1, 7])
def test_more_rows_than_there_are_do_not_decode(device, num_decodes):
    batch = make_batch(CASE, device)
    integers = {"dtype": torch.int32, "device": device}
    caches = paged_caches(batch.key_cache, batch.value_cache)
    with pytest.raises(ValueError, match=f"num_decodes is {num_decodes} of 6 rows"):
        PagedAttention.of(
            AlikeLayers.of(batch.query.shape, batch.query.dtype, caches, batch.scoring),
            batch.block_tables,
            torch.tensor(batch.seq_lens, **integers),
            torch.tensor(batch.query_start_loc, **integers),
            num_decodes,
            None,
        )
