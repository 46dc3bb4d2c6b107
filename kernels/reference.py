"""The specification of every kernel, in plain torch: slow, obvious, and what the fast ones are tested against.

Paged attention is that of Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), https://arxiv.org/abs/2309.06180. Sampling is specified in `kernels/sampling.py`.
"""

import torch
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation, Scoring, Selection
from pagewire.kernels.cache_rows import read_rows, write_rows


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of a step's tokens to their slots of one layer's cache, in place.

    Args:
        key, value: [T, num_kv_heads, head_dim].
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, row_size], strided or not. They hold what
            `write_rows` of `pagewire.kernels.cache_rows` makes of keys and values.
        slot_mapping: [T], `block_id * block_size + offset` of each token; a token of slot -1 is skipped.
    """
    key, value = write_rows(key, key_cache.dtype), write_rows(value, value_cache.dtype)
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == -1:
            continue
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def copy_blocks(cache: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies block source_ids[i] of the cache to block target_ids[i], for all i, in place.

    The cache is [num_blocks, ...]; ids are [N]. No target is named twice, and none is a source too.
    """
    for source, target in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        cache[target] = cache[source]


def gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copies block block_ids[i] of the cache, [num_blocks, ...], to staging[i], for all i; staging: [N, ...]."""
    for index, block_id in enumerate(block_ids.tolist()):
        staging[index] = cache[block_id]


def scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Copies staging[i] to block block_ids[i] of the cache, for all i, as in `gather_blocks`; no id is named twice."""
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
    selection: Selection | None = None,
) -> Tensor:
    """Causal attention of S rows over one layer's paged cache, which already holds the rows' own keys and values.

    Row i owns tokens query_start_loc[i] to query_start_loc[i + 1] of the batch; they are the last ones of its
    seq_lens[i] positions. With a window, a query at position q attends to positions q - window + 1 to q alone.
    Positions from seq_lens[i] on, those before the window of the row's first query, and those of blocks that are not
    selected are never read: they may hold anything, NaN included. A query that attends to nothing, as in a padding row
    of seq_len 0, gives zeros.

    Args:
        query: [T, num_heads, head_dim]; as many heads in a row as num_heads / num_kv_heads read one KV head.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, row_size], as `write_rows` fills them.
        block_tables: [S, max_blocks], block ids; entries of blocks without a position to read are never read.
        seq_lens: [S], positions of each row after this step.
        query_start_loc: [S + 1].
        scoring: how products become weights.
        selection: the blocks to read; None: all of a row's.

    Returns:
        [T, num_heads, head_dim], of the query's dtype; computed in float32, or in float64 for a query of that.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    groups = query.unflatten(1, (num_kv_heads, -1)).to(torch.promote_types(query.dtype, torch.float32))
    slopes = query.new_zeros(query.shape[1]) if scoring.alibi_slopes is None else scoring.alibi_slopes
    slopes, window = slopes.view(num_kv_heads, -1), scoring.window
    sinks = None if scoring.sinks is None else scoring.sinks.to(groups.dtype).view(num_kv_heads, -1)
    output = torch.zeros_like(groups)  # [T, num_kv_heads, num_groups, head_dim]
    for row, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        first = max(0, seq_len - (end - start) - window + 1) if window else 0  # that any query of the row attends to
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        for head in range(num_kv_heads):
            positions = torch.arange(first, seq_len, device=query.device)
            if selection is not None:
                selected = selection.blocks[row, head, : int(selection.num_blocks[row, head])]
                positions = positions[torch.isin(positions // block_size, selected)]
            slots = block_tables[row].long()[positions // block_size], positions % block_size, head
            # [N, head_dim] each
            keys, values = (read_rows(cache[slots], groups.dtype) for cache in (key_cache, value_cache))
            scores = torch.einsum("qgd,nd->gqn", groups[start:end, head], keys) * scoring.scale
            distances = query_positions[:, None] - positions  # [queries, N]
            own_sinks = None if sinks is None else sinks[head]
            weights = attention_weights(scores, distances, window, slopes[head], scoring.softcap, own_sinks)
            output[start:end, head] = torch.einsum("gqn,nd->qgd", weights, values)
    return output.flatten(1, 2).to(query.dtype)


def attention_weights(
    scores: Tensor, distances: Tensor, window: int, slopes: Tensor, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """The weights of the values that each query attends to; zeros where it attends to nothing.

    Args:
        scores: [num_heads, queries, N], scaled, float32.
        distances: [queries, N], positions from key to query; a key after its query is hidden.
        window: hides keys at a distance of `window` or more; 0: none.
        slopes: [num_heads], what a score falls by for each position of distance.
        softcap: bounds the scores to softcap * tanh(score / softcap), before the slopes; 0: leaves them.
        sinks: [num_heads], scores without a value that count in each query's sum of weights; None: there are none.

    Returns:
        [num_heads, queries, N].
    """
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores - slopes[:, None, None] * distances
    is_hidden = distances < 0
    if window:
        is_hidden |= distances >= window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : distances.shape[1]]
    return weights.masked_fill(is_hidden.all(dim=-1, keepdim=True), 0.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalization (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    Of the last dimension; computed in float32 and rounded to the dtype of `weight`, [size], before that is multiplied.
    """
    wide = x.float()
    unit = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (unit.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += update in place, both [T, size]; returns `rms_norm` of the sum."""
    return rms_norm(x.add_(update), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020, https://arxiv.org/abs/2002.05202): [T, 2 * size], gates first, to [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gate.float() / (1 + (-gate.float()).exp())).to(gate.dtype) * up


def norm_rope(heads: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes each head of queries and keys where it has a weight, then turns it by its position, in place.

    Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) of pairs (i, i + head_dim / 2).

    Args:
        heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; values stay.

    Returns:
        Views of `heads`: queries, keys and values.
    """
    num_heads, query_weight, key_weight, eps, cos, sin = preparation
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    queries, keys, values = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for part, weight in ((queries, query_weight), (keys, key_weight)):
        x = part if weight is None else rms_norm(part, weight, eps)
        swapped = x.roll(x.shape[-1] // 2, dims=-1).float()
        part.copy_((x * cos[:, None]).float() + swapped * sin[:, None].float())
    return queries, keys, values
