"""The specification of every kernel, in plain torch: slow, obvious, and what the fast ones are tested against.

Paged attention is that of Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), https://arxiv.org/abs/2309.06180.
"""

import torch
from torch import Tensor


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of a step's tokens to their slots of one layer's cache, in place.

    Args:
        key, value: [T, num_kv_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], strided or not.
        slot_mapping: [T], `block_id * block_size + offset` of each token; a token of slot -1 is skipped.
    """
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    query_start_loc: list[int],
    scale: float,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of S rows over one layer's paged cache, which already holds the rows' own keys and values.

    Row i owns tokens query_start_loc[i] to query_start_loc[i + 1] of the batch; they are the last ones of its
    seq_lens[i] positions. With a window (Beltagy et al., "Longformer", 2020, https://arxiv.org/abs/2004.05150), a query
    at position q attends to positions q - window + 1 to q alone. Positions from seq_lens[i] on, and those before the
    window of the row's first query, are never read: they may hold anything, NaN included.

    Args:
        query: [T, num_heads, head_dim]; num_heads is a multiple of num_kv_heads, and head h reads KV head
            h // (num_heads // num_kv_heads).
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        block_tables: [S, max_blocks], block ids; entries past a row's last block, and those of blocks that end before
            the window of its first query, are never read.
        seq_lens: [S], positions of each row after this step.
        query_start_loc: [S + 1].
        scale: factor of the scores, usually head_dim ** -0.5.
        window: positions that a query attends to, its own included; 0: all up to its own.
        alibi_slopes: [num_heads]; a score falls by its head's slope for each position between query and key (Press et
            al., "Train Short, Test Long", 2021, https://arxiv.org/abs/2108.12409).
        softcap: bounds the scaled scores to softcap * tanh(score / softcap), before ALiBi; 0: leaves them (Gemma 2,
            https://arxiv.org/abs/2408.00118).

    Returns:
        [T, num_heads, head_dim], of the query's dtype; computed in float32.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_groups = query.shape[1] // num_kv_heads
    output = torch.empty_like(query)
    for row, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        first = max(0, seq_len - (end - start) - window + 1) if window else 0  # that any query of the row attends to
        positions = torch.arange(first, seq_len, device=query.device)
        blocks, offsets = block_tables[row].long()[positions // block_size], positions % block_size
        keys = key_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)  # [N, num_heads, head_dim]
        values = value_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)
        scores = torch.einsum("qhd,nhd->hqn", query[start:end].float(), keys) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        distances = positions[start - end :, None] - positions[None, :]  # [queries, N]
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * distances
        is_hidden = distances < 0
        if window:
            is_hidden |= distances >= window
        probabilities = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
        output[start:end] = torch.einsum("hqn,nhd->qhd", probabilities, values).to(query.dtype)
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalization (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    Of the last dimension; computed in float32 and rounded to the dtype of `x` before `weight`, [size], is multiplied.
    """
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += update in place, both [T, size]; returns `rms_norm` of the sum."""
    return rms_norm(x.add_(update), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020, https://arxiv.org/abs/2002.05202): [T, 2 * size], gates first, to [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate.float() / (1 + (-gate.float()).exp())).to(gate.dtype) * up


def norm_rope(
    heads: Tensor,
    num_heads: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes each head of queries and keys where it has a weight, then turns it by its position, in place.

    Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) of pairs (i, i + head_dim / 2).

    Args:
        heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; values stay.
        query_weight, key_weight: [head_dim] of `rms_norm`, or None.
        cos, sin: [T, head_dim]; the first half of the sines is negated.

    Returns:
        Views of `heads`: queries, keys and values.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for part, weight in ((queries, query_weight), (keys, key_weight)):
        x = part if weight is None else rms_norm(part, weight, eps)
        swapped = x.roll(x.shape[-1] // 2, dims=-1).float()
        part.copy_((x * cos[:, None]).float() + swapped * sin[:, None].float())
    return queries, keys, values
