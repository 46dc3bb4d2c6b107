"""Argument types that the implementations of a kernel share with its specification."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pagewire.network.operations import BlockPattern

# The (key_cache, value_cache) of one layer, each a view [num_blocks, block_size, num_kv_heads, row_size]; see
# `pagewire.kernels.cache_rows`.
LayerCache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Scoring:
    """The parameters that turn the dot products of queries and keys into attention weights: scale, window, ALiBi
    slopes, softcap, sinks and block pattern.

    `pagewire.kernels.reference.attention_weights` specifies the computation.

    Attributes:
        scale: factor of the dot products, above 0; usually head_dim ** -0.5.
        window: number of positions that a query attends to, including its own position. 0 means all positions up to its
            own (Beltagy et al., "Longformer", 2020, https://arxiv.org/abs/2004.05150).
        alibi_slopes: [num_heads] float32. A score decreases by the slope of its head for each position between query
            and key (ALiBi: Press et al., "Train Short, Test Long", 2021, https://arxiv.org/abs/2108.12409). None means
            no ALiBi.
        softcap: bounds the scores to softcap * tanh(score / softcap), before ALiBi. 0 means that the scores are not
            bounded (Gemma 2, https://arxiv.org/abs/2408.00118).
        sinks: [num_heads] float32, one additional score for each head. A sink has no value vector, and query, position
            and softcap do not change it. It is included in the sum of the softmax (gpt-oss,
            https://arxiv.org/abs/2508.10925; after Xiao et al., "Efficient Streaming Language Models with Attention
            Sinks", 2023, https://arxiv.org/abs/2309.17453). None means no sinks.
        is_bidirectional: whether a query also attends to later positions of its row: all of them, or with a window as
            many as before it. Only the C kernels support it, and not together with ALiBi.
        pattern: the blocks of positions that queries attend to, in block-sparse attention. None means all blocks.
    """

    scale: float
    window: int = 0
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    is_bidirectional: bool = False
    pattern: BlockPattern | None = None


class NormRopeParams(NamedTuple):
    """The arguments with which `norm_rope` prepares the query and key heads of a step of T tokens: the norm weights,
    and the cosines and sines of the rotation angles."""

    num_heads: int  # query heads, which come first
    query_weight: Tensor | None  # [head_dim], as in `rms_norm`; None: queries are not normalized
    key_weight: Tensor | None  # the same for keys
    eps: float  # added to the mean square
    cos: Tensor  # [T, head_dim], for pairs (i, i + head_dim / 2)
    sin: Tensor  # [T, head_dim], the first half negated
    rotates_first: bool = False  # heads are rotated before they are normalized, not after
