"""Paged attention of a mixed batch: rows that decode and rows with more queries, as two launches and never one bad one.

A tile for many queries wastes most of its work on a row with one, and a tile for one query reads a prompt's keys once
for each of its queries.
"""

import torch
from torch import Tensor

from pagewire.kernels.arguments import Scoring, Selection
from pagewire.kernels.triton.decode_attention import paged_attention_v1, paged_attention_v2
from pagewire.kernels.triton.prefill_attention import paged_prefill
from pagewire.kernels.triton.split_plan import SplitPlan


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_decodes: int,
    plan: SplitPlan | None,
    scoring: Scoring,
    selection: Selection | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Attention of S rows over one layer's paged cache, which already holds the rows' own keys and values.

    Args:
        query: [T, num_heads, head_dim]; the rows that decode come first, one query each.
        key_cache, value_cache, block_tables, seq_lens, scoring, selection, output: of `paged_prefill`.
        query_start_loc: [S + 1] int32, on the device.
        num_decodes: how many rows come first with one query; the host knows it, so that it waits for nothing.
        plan: decided for the first `num_decodes` of seq_lens, once a step: they are cut into splits, by
            `paged_attention_v2`. None: they are not; see `prefers_splits`.

    Returns:
        [T, num_heads, head_dim], of the query's dtype. What belongs to no row is not written.

    Raises:
        ValueError: a shape, dtype, stride or number is not one of these.
    """
    num_rows = seq_lens.numel()
    if not 0 <= num_decodes <= min(num_rows, query.shape[0]):
        raise ValueError(f"num_decodes is {num_decodes} of {num_rows} rows with {query.shape[0]} queries")
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)

    for rows, is_decoding in ((slice(0, num_decodes), True), (slice(num_decodes, None), False)):
        if not seq_lens[rows].numel():
            continue
        tensors = (query[rows], key_cache, value_cache, block_tables[rows], seq_lens[rows])
        others = (scoring, _of_rows(selection, rows), output[rows])
        if not is_decoding:
            paged_prefill(*tensors, query_start_loc[rows], *others)
        elif plan is None:
            paged_attention_v1(*tensors, *others)
        else:
            paged_attention_v2(*tensors, plan, *others)
    return output


def mixed_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    decode_lens: Tensor,
    prefill_lens: Tensor,
    query_start_loc: Tensor,
    plan: SplitPlan | None,
    scoring: Scoring,
) -> Tensor:
    """`paged_attention` where the device alone knows how many rows decode, so that a graph serves any mix of them.

    Both kernels are launched over all rows. Programs of rows that are not theirs end at once; the first zeroes one
    query for each of these, and the second writes those of all rows that do not decode.

    Args:
        query, key_cache, value_cache, block_tables, query_start_loc, scoring: of `paged_attention`. There are at least
            as many queries as rows, and every one belongs to a row.
        decode_lens: [S] int32, seq_lens of the rows that decode, 0 for the others.
        prefill_lens: [S] int32, -1 for the rows that decode, seq_lens of the others.
        plan: decided for `decode_lens`, or None.

    Returns:
        [T, num_heads, head_dim], of the query's dtype.

    Raises:
        ValueError: a shape, dtype, stride or number is not one of these.
    """
    num_rows = decode_lens.numel()
    if num_rows > query.shape[0]:
        raise ValueError(f"there are {num_rows} rows with {query.shape[0]} queries; pass at least as many queries")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    caches = (key_cache, value_cache, block_tables)
    others = (scoring, None, output[:num_rows])
    if plan is None:
        paged_attention_v1(query[:num_rows], *caches, decode_lens, *others)
    else:
        paged_attention_v2(query[:num_rows], *caches, decode_lens, plan, *others)
    return paged_prefill(query, *caches, prefill_lens, query_start_loc, scoring, None, output)


def _of_rows(selection: Selection | None, rows: slice) -> Selection | None:
    return None if selection is None else Selection(selection.blocks[rows], selection.num_blocks[rows])
