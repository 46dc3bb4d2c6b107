"""The two functions of flash-attn 2.8.3 that we call, in plain torch: their arguments, refusals and results.

Causal masks and windows are aligned to the bottom right. A query that sees no position gets 0. Sources: the docstrings
of flash_attn/flash_attn_interface.py and the checks of csrc/flash_attn/flash_api.cpp.
"""

import torch

calls: list[tuple[str, int]] = []  # name and number of queries


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Return attention over prompts of different lengths.

    q: [total_q, nheads, headdim]; k, v: [num_blocks, page_block_size, nheads_k, headdim] with a block table.
    """
    calls.append(("flash_attn_varlen_func", len(q)))
    num_rows = len(cu_seqlens_q) - 1
    _check(q, k, v, block_table, num_rows)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        assert starts.dtype == torch.int32, f"{name} must have dtype int32"
        assert starts.is_contiguous(), f"{name} must be contiguous"
        assert starts.shape == (num_rows + 1,), f"{name} must have shape (batch_size + 1)"
        assert starts[0] == 0, f"{name} must begin with 0"
    assert len(q) == cu_seqlens_q[-1]
    num_queries, num_keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(num_queries) <= max_seqlen_q, "a row has more queries than max_seqlen_q: no program computes them"
    assert max(num_keys) <= max_seqlen_k, "a row has more keys than max_seqlen_k"
    out, start = torch.empty_like(q), 0
    for row, (queries, keys) in enumerate(zip(num_queries, num_keys, strict=True)):
        tokens = slice(start, start + queries)
        table = block_table[row]
        out[tokens] = _attend(q[tokens], k, v, table, keys, softmax_scale, causal, window_size, alibi_slopes)
        start += queries
    return out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """Return attention over a cache.

    q: [batch_size, seqlen, nheads, headdim]; caches have the shapes of k and v above.
    """
    calls.append(("flash_attn_with_kvcache", q.shape[0] * q.shape[1]))
    assert q.dim() == 4
    _check(q, k_cache, v_cache, block_table, len(q))
    assert cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32"
    assert cache_seqlens.is_contiguous(), "seqlens_k must be contiguous"
    assert cache_seqlens.shape == (len(q),)
    assert cache_seqlens.max() <= block_table.shape[1] * k_cache.shape[1]
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    options = (softmax_scale, causal, window_size, alibi_slopes)
    return torch.stack([_attend(row, k_cache, v_cache, table, keys, *options) for row, table, keys in rows])


def _check(q, k, v, block_table, num_rows):
    num_heads, head_dim = q.shape[-2:]
    assert num_rows > 0, "batch size must be positive"
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert k.dtype == v.dtype == q.dtype, "query and key must have the same dtype"
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension"
    assert block_table.dtype == torch.int32, "block_table must have dtype torch.int32"
    assert block_table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert k.shape == v.shape
    assert k.shape[3] == head_dim
    assert num_heads % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"
    assert head_dim <= 256
    assert head_dim % 8 == 0
    assert block_table.dim() == 2
    assert len(block_table) == num_rows


def _attend(q, k_cache, v_cache, block_table, num_keys, scale, causal, window_size, alibi_slopes):
    """Return the attention of one row, [queries, heads, head_dim], over the pages of its table.

    Slopes are [heads] float32. The bias -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key
    j.
    """
    num_queries, page_size = len(q), k_cache.shape[1]
    positions = torch.arange(num_keys, device=q.device)
    pages, offsets = block_table.long()[positions // page_size], positions % page_size
    num_groups = q.shape[1] // k_cache.shape[2]
    keys = k_cache[pages, offsets].float().repeat_interleave(num_groups, dim=1)
    values = v_cache[pages, offsets].float().repeat_interleave(num_groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ends = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries  # each query's last key
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32"
        assert alibi_slopes.shape == (q.shape[1],)
        assert alibi_slopes.is_contiguous()
        scores -= alibi_slopes[:, None, None] * (ends - positions).abs()
    left, right = window_size
    if causal:
        right = 0
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    if right >= 0:
        is_seen &= positions <= ends + right
    if left >= 0:
        is_seen &= positions >= ends - left
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    # Unseen values may be anything: flash-attn loads no tile of them, and clears the values past the row's end.
    values[~is_seen.any(0)] = 0.0
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
