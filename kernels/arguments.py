"""Arguments of more than a tensor or two that the implementations of a kernel and its specification share."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# One layer's (key_cache, value_cache), each a view [num_blocks, block_size, num_kv_heads, row_size]; see
# `pagewire.kernels.cache_rows`.
LayerCache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How products of queries and keys become weights. `pagewire.kernels.reference.attention_weights` specifies it.

    Attributes:
        scale: factor of the products, above 0; usually head_dim ** -0.5.
        window: positions that a query attends to, its own included; 0: all up to its own (Beltagy et al., "Longformer",
            2020, https://arxiv.org/abs/2004.05150).
        alibi_slopes: [num_heads] float32; a score falls by its head's slope for each position between query and key
            (ALiBi: Press et al., "Train Short, Test Long", 2021, https://arxiv.org/abs/2108.12409). None: by nothing.
        softcap: bounds the scores to softcap * tanh(score / softcap), before ALiBi; 0: leaves them as they are
            (Gemma 2, https://arxiv.org/abs/2408.00118).
        sinks: [num_heads] float32; a score of each head that no query, position or softcap changes, and that has no
            value: weights are shares of a sum in which it counts (gpt-oss, https://arxiv.org/abs/2508.10925; after Xiao
            et al., "Efficient Streaming Language Models with Attention Sinks", 2023, https://arxiv.org/abs/2309.17453).
            None: there are none.
    """

    scale: float
    window: int = 0
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


class Selection(NamedTuple):
    """The blocks that are read, where attention does not read all of a row's blocks.

    Attributes:
        blocks: [S, num_kv_heads, max_selected] logical blocks (indexes into the row's block table) that a row's KV head
            reads, each once, in any order; int32 and dense for the kernels.
        num_blocks: [S, num_kv_heads], how many of them count; the others may hold anything. Also int32 and dense.
    """

    blocks: Tensor
    num_blocks: Tensor


class HeadPreparation(NamedTuple):
    """The norms and rotations that `norm_rope` applies to the heads of queries and keys before they attend, for a step
    of T tokens."""

    num_heads: int  # of the queries, which come first
    query_weight: Tensor | None  # [head_dim] of `rms_norm`; None: queries are not normalized
    key_weight: Tensor | None  # the same for keys
    eps: float  # added to the mean square
    cos: Tensor  # [T, head_dim] of pairs (i, i + head_dim / 2)
    sin: Tensor  # [T, head_dim], the first half negated
