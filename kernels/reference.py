"""The specification of the kernels in plain torch: slow and simple; the tests compare the fast kernels with it.

Paged attention follows Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(2023), https://arxiv.org/abs/2309.06180. `kernels/sampling.py` specifies sampling.
"""

import torch
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams, Scoring
from pagewire.kernels.cache_rows import read_rows, write_rows
from pagewire.network.operations import BlockPattern


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of a step's tokens to one layer's paged KV cache, in place. `slot_mapping` gives the
    cache position of each token.

    Args:
        key, value: [T, num_kv_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, row_size], with any strides. Rows are written in
            the layout of `pagewire.kernels.cache_rows.write_rows`.
        slot_mapping: [T], `block_id * block_size + offset` of each token; a token with slot -1 is skipped.
    """
    key, value = write_rows(key, key_cache.dtype), write_rows(value, value_cache.dtype)
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def copy_blocks(cache: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy KV cache blocks within the cache, in place: block source_ids[i] to block target_ids[i], for all i.

    The cache is [num_blocks, ...]; ids are [N]. No block may be a target twice, or both a source and a target.
    """
    for source, target in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        cache[target] = cache[source]


def gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy KV cache blocks to a staging buffer: block block_ids[i] of the cache, [num_blocks, ...], to staging[i], for
    all i. `staging` is [N, ...]."""
    for index, block_id in enumerate(block_ids.tolist()):
        staging[index] = cache[block_id]


def scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Copy KV cache blocks from a staging buffer [N, ...] to the cache: staging[i] to block block_ids[i], for all i. No
    block id may occur twice."""
    for index, block_id in enumerate(block_ids.tolist()):
        cache[block_id] = staging[index]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: list[int],
    query_start_loc: list[int],
    scoring: Scoring,
) -> Tensor:
    """Compute attention of S rows (one running sequence each) over one layer's paged KV cache, which already contains
    the keys and values of the new tokens. The attention is causal unless `scoring.is_bidirectional` is set.

    Row i has tokens query_start_loc[i] to query_start_loc[i + 1] of the batch; they are the last of its seq_lens[i]
    positions. With a window, a query at position q attends only to positions q - window + 1 to q. Two kinds of
    positions are never read and may contain anything, including NaN: positions from seq_lens[i] on, and positions
    before the window of the row's first query. A query that attends to no position, such as the query of a padding row
    with seq_len 0, returns zeros.

    Args:
        query: [T, num_heads, head_dim]; each KV head is shared by num_heads / num_kv_heads consecutive query heads.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, row_size], in the layout of `write_rows`.
        block_tables: [S, max_blocks], block ids; an entry is not read if no position of its block is read.
        seq_lens: [S], the number of positions of each row after this step.
        query_start_loc: [S + 1].
        scoring: the parameters that turn dot products into attention weights.

    Returns:
        [T, num_heads, head_dim] in the dtype of the query; computed in float32, or in float64 for a float64 query.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    groups = query.unflatten(1, (num_kv_heads, -1)).to(torch.promote_types(query.dtype, torch.float32))
    slopes = query.new_zeros(query.shape[1]) if scoring.alibi_slopes is None else scoring.alibi_slopes
    slopes, window = slopes.view(num_kv_heads, -1), scoring.window
    sinks = None if scoring.sinks is None else scoring.sinks.to(groups.dtype).view(num_kv_heads, -1)
    output = torch.zeros_like(groups)  # [T, num_kv_heads, num_groups, head_dim]
    for row, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        first = max(0, seq_len - (end - start) - window + 1) if window else 0  # that a query attends to
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        for head in range(num_kv_heads):
            positions = torch.arange(first, seq_len, device=query.device)
            slots = block_tables[row].long()[positions // block_size], positions % block_size, head
            # [N, head_dim] each
            keys, values = (read_rows(cache[slots], groups.dtype) for cache in (key_cache, value_cache))
            scores = torch.einsum("qgd,nd->gqn", groups[start:end, head], keys) * scoring.scale
            distances = query_positions[:, None] - positions  # [queries, N]
            if scoring.is_bidirectional:
                distances = distances.abs()
            is_hidden = distances < 0
            if window:
                is_hidden |= distances >= window
            if scoring.pattern is not None:
                heads = head * len(scores) + torch.arange(len(scores), device=query.device)[:, None, None]
                is_hidden = is_hidden | ~sees_blocks(scoring.pattern, query_positions[:, None], positions, heads)
            own_sinks = None if sinks is None else sinks[head]
            weights = attention_weights(scores, distances, is_hidden, slopes[head], scoring.softcap, own_sinks)
            output[start:end, head] = torch.einsum("gqn,nd->qgd", weights, values)
    return output.flatten(1, 2).to(query.dtype)


def sees_blocks(pattern: BlockPattern, queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
    """Return whether queries attend to the blocks of keys in block-sparse attention. `queries` and `keys` are
    positions, and `heads` are query heads. The arguments are broadcast to the shape of the result. Keys after a query
    are not hidden."""
    blocks = keys // pattern.block_size
    is_local = queries // pattern.block_size - blocks < pattern.num_local
    return is_local | ((blocks + pattern.first + heads * pattern.head_step) % pattern.stride == 0)


def attention_weights(
    scores: Tensor, distances: Tensor, is_hidden: Tensor, slopes: Tensor, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the attention weights of each query: the softmax over the scores of the keys that the query may attend
    to. The weights of a query that attends to no position are zeros.

    Args:
        scores: [num_heads, queries, N], scaled, float32.
        distances: [queries, N], the number of positions from key to query.
        is_hidden: [queries, N] or [num_heads, queries, N], the keys to which a query may not attend.
        slopes: [num_heads], the decrease of a score for each position of distance.
        softcap: bounds the scores to softcap * tanh(score / softcap), before the slopes. 0 means that the scores are
            not bounded.
        sinks: [num_heads], scores without a value vector that count in the softmax sum of each query. None means no
            sinks.

    Returns:
        [num_heads, queries, N].
    """
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores - slopes[:, None, None] * distances
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : distances.shape[1]]
    return weights.masked_fill(is_hidden.all(dim=-1, keepdim=True), 0.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square normalization of x over the last dimension (Zhang and Sennrich, 2019,
    https://arxiv.org/abs/1910.07467).

    The normalized values are computed in float32 and rounded to the dtype of `weight`, [size]. Then they are multiplied
    by `weight`, and the result has the dtype of `x`.
    """
    wide = x.float()
    unit = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (unit.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to the residual stream `x` in place, both [T, size], and return `rms_norm` of the sum."""
    return rms_norm(x.add_(update), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, the activation of a gated MLP (Shazeer, 2020, https://arxiv.org/abs/2002.05202): [T, 2 *
    size] -> [T, size]. The gates are in the first half of each row of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate.float() / (1 + (-gate.float()).exp())).to(gate.dtype) * up


def norm_rope(heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare query and key heads for attention, in place: normalize the heads that have a norm weight, then apply
    rotary position embedding. With `rotates_first`, normalize after the rotation.

    The rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) rotates pairs (i, i + head_dim /
    2).

    Args:
        heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values. The values are not changed.
        preparation: the norm weights and rotation tables.

    Returns:
        Views of `heads`: queries, keys and values.
    """
    num_heads, query_weight, key_weight, eps, cos, sin, rotates_first = preparation
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for part, weight in ((queries, query_weight), (keys, key_weight)):
        x = part if weight is None or rotates_first else rms_norm(part, weight, eps)
        swapped = x.roll(x.shape[-1] // 2, dims=-1).float()
        part.copy_((x * cos[:, None]).float() + swapped * sin[:, None].float())
        if weight is not None and rotates_first:
            part.copy_(rms_norm(part, weight, eps))
    return queries, keys, values
