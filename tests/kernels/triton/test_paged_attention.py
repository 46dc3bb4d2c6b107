"""`pagewire.kernels.triton.paged_attention`: rows that decode and others in one batch are what each is alone."""

import itertools
from dataclasses import replace

import pytest
import torch

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import paged_attention as module
from pagewire.kernels.triton.paged_attention import paged_attention
from tests.kernels.triton.checks.prefill_attention import E4M3, Case, check_paged_attention, make_batch

CASE = Case(((1, 40), (1, 17), (1, 0), (12, 20), (9, 9), (1, 5)), num_kv_heads=2, num_groups=2)
FEATURES = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "8-bit": {"cache_dtype": E4M3},
    "window": {"window": 6},
    "softcap": {"softcap": 2.0},
    "alibi": {"has_alibi": True},
    "selected": {"is_selected": True},
    "shared": {"is_shared": True},
    "head-major": {"is_head_major": True},
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(device, feature, splits):
    check_paged_attention(device, replace(CASE, **FEATURES[feature]), 3, splits=splits)


@pytest.mark.parametrize(("num_decodes", "splits"), list(itertools.product([0, 1, 2, 3], [False, True])))
def test_every_share_of_rows_that_decode(device, num_decodes, splits):
    """A row with one query may be with the others too."""
    check_paged_attention(device, CASE, num_decodes, splits=splits and num_decodes > 0)


@pytest.mark.parametrize("splits", [False, True])
def test_each_part_has_its_own_launch(device, monkeypatch, splits):
    """Any of the three would compute the right result: what counts is which one is asked."""
    launched = []
    for name in ("paged_attention_v1", "paged_attention_v2", "paged_prefill"):
        kernel = getattr(module, name)

        def launch(query, *arguments, name=name, kernel=kernel):
            launched.append((name, len(query)))
            return kernel(query, *arguments)

        monkeypatch.setattr(module, name, launch)
    check_paged_attention(device, CASE, 3, splits=splits)
    assert launched == [("paged_attention_v2" if splits else "paged_attention_v1", 3), ("paged_prefill", 22)]


def test_rows_that_all_decode(device):
    check_paged_attention(device, replace(CASE, rows=CASE.rows[:3]), 3, splits=True)


@pytest.mark.parametrize("num_decodes", [-1, 7])
def test_more_rows_than_there_are_do_not_decode(device, num_decodes):
    batch = make_batch(CASE, device)
    integers = {"dtype": torch.int32, "device": device}
    with pytest.raises(ValueError, match=f"num_decodes is {num_decodes} of 6 rows"):
        paged_attention(
            *(batch.query, batch.key_cache, batch.value_cache, batch.block_tables),
            *(torch.tensor(batch.seq_lens, **integers), torch.tensor(batch.query_start_loc, **integers)),
            *(num_decodes, None, Scoring(1.0)),
        )
