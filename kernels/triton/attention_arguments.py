"""The arguments of the attention kernels: their construction from the caller's tensors, and their validation."""

from collections import namedtuple
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.cache import check_caches
from pagewire.kernels.triton.launching import ALIGNMENT, FLOATS, RepeatedLaunch, Strided, check_tensor, operand

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
# Finite and below every score. If a tile has no position to read, the difference of two infinities would be NaN.
LOWEST = tl.constexpr(-3.0e38)


# A `Scoring` in units of log 2: the factor of the dot products (see `score_factor`), and the softcap or None. The
# slopes and sinks, [num_heads] float32 or None, are in units of 1. The pattern is a `BlockPattern` or None.
ScoreArguments = namedtuple("ScoreArguments", "factor cap slopes sinks pattern")
# The compile-time constants of a kernel: query heads per KV head; head_dim and the next power of two; positions per
# block; the rows of queries and the positions of keys in a tile; and the type of the operands of dot products.
AttentionConstants = namedtuple(
    "AttentionConstants", "num_groups head_dim padded_dim block_size block_m block_n operand"
)


# The key cache and the value cache of one layer.
PagedCaches = tuple[Strided, Strided]


class LayerTensors(NamedTuple):
    """The kernel arguments of one attention layer: the tensors that differ from layer to layer. Layers whose tensors
    have the same memory layout have the same `kind`, so that `RepeatedLaunch` can reuse the kernel compiled for another
    layer."""

    output: Strided
    query: Strided
    caches: PagedCaches
    weighing: ScoreArguments
    kind: Hashable


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """The attention layers of a model that have equal shapes and equal `Scoring`, except for their sinks. Arguments
    that are common to these layers are checked once per step, and not once per layer.

    Attributes:
        query_shape: [T, num_heads, head_dim].
        query_dtype: dtype of the queries.
        cache_shape: shape of the key cache and of the value cache, [num_blocks, block_size, num_kv_heads, head_dim].
        cache_dtype: dtype of both caches.
        scoring: the parameters that turn dot products into attention weights.
        weighing: `scoring`, including its sinks, as kernel arguments.
    """

    query_shape: tuple[int, ...]
    query_dtype: torch.dtype
    cache_shape: tuple[int, ...]
    cache_dtype: torch.dtype
    scoring: Scoring
    weighing: ScoreArguments

    @staticmethod
    def of(
        query_shape: tuple[int, ...], query_dtype: torch.dtype, caches: PagedCaches, scoring: Scoring
    ) -> "AlikeLayers":
        """Return the common arguments of layers whose queries have this shape and dtype, and whose KV caches have the
        shape and dtype of `caches`.

        Raises ValueError if the arguments do not match or are not supported.
        """
        cache = caches[0].data
        _check_queries(query_shape, query_dtype, cache)
        check_scoring(scoring, query_shape[1])
        cap = scoring.softcap * LOG2_E if scoring.softcap else None
        numbers = (scoring.alibi_slopes, scoring.sinks, scoring.pattern)
        weighing = ScoreArguments(score_factor(scoring), cap, *numbers)
        return AlikeLayers(tuple(query_shape), query_dtype, tuple(cache.shape), cache.dtype, scoring, weighing)

    def launch(self, kernel: Any, name: str, grid: Callable[[AttentionConstants], tuple[int, int]]) -> RepeatedLaunch:
        """Return an object that launches an attention kernel for these layers. The tile, the part of the
        work that one program computes at a time, is looked up in `tiles` under `name`. `grid` is called with the
        kernel's constants and returns the launch grid."""
        _, num_heads, head_dim = self.query_shape
        num_groups = num_heads // self.cache_shape[2]
        tile = tiles.lookup(name, head_dim=head_dim, num_groups=num_groups, dtype=self.cache_dtype)
        sizes = (num_groups, head_dim, triton.next_power_of_2(head_dim), self.cache_shape[1])
        shape = AttentionConstants(*sizes, tile.block_m, tile.block_n, operand(self.query_dtype, self.cache_dtype))
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return RepeatedLaunch(kernel, (*grid(shape), 1), {"SHAPE": shape}, options)

    def rows(self, block_tables: Tensor, seq_lens: Tensor, num_rows: int, window: int | None) -> tuple[Any, ...]:
        """Return the kernel arguments that describe `num_rows` rows (running sequences), in the order of the kernel
        parameters.

        The arguments are block_tables, their row stride, seq_lens, and `window` unchanged. Tensors with one entry per
        row are separate arguments and not in a tuple: Triton recompiles a kernel if the alignment of a tensor inside a
        tuple changes. Raises ValueError if a tensor does not have `num_rows` rows.
        """
        check_tensor("block_tables", block_tables, (num_rows, "max_blocks"), torch.int32, is_strided=True)
        check_tensor("seq_lens", seq_lens, (num_rows,), torch.int32)
        return block_tables, block_tables.stride(0), seq_lens, window

    def tensors(
        self, query: Tensor, caches: PagedCaches, sinks: Tensor | None = None, output: Tensor | None = None
    ) -> LayerTensors:
        """Return the kernel arguments of one layer: queries, KV caches, sinks and output. If `output` is None, its
        memory is allocated.

        `sinks` are the attention sinks of this layer, [num_heads] float32. If `sinks` is None, the sinks of `scoring`
        are used. Raises ValueError if a tensor does not match the layers.
        """
        cache, others = caches[0].data, caches[1].data
        if cache.shape != self.cache_shape or others.shape != self.cache_shape or cache.dtype != self.cache_dtype:
            raise ValueError(
                f"the caches are {list(cache.shape)} {cache.dtype}; these layers were prepared for "
                f"{list(self.cache_shape)} {self.cache_dtype}"
            )
        if output is None:
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for name, tensor in (("query", query), ("output", output)):
            check_tensor(name, tensor, self.query_shape, self.query_dtype, is_strided=True)
        query_strides, output_strides = query.stride(), output.stride()
        addresses = query.data_ptr() | output.data_ptr() | cache.data_ptr() | others.data_ptr()
        weighing = self.weighing
        if sinks is not None:
            check_tensor("sinks", sinks, (self.query_shape[1],), torch.float32)
            weighing = weighing._replace(sinks=sinks)
            addresses |= sinks.data_ptr()
        kind = None
        if addresses % ALIGNMENT == 0:
            kind = (query_strides, output_strides, caches[0].strides, caches[1].strides, sinks is None)
        query_argument, output_argument = Strided(query, query_strides[:-1]), Strided(output, output_strides[:-1])
        return LayerTensors(output_argument, query_argument, caches, weighing, kind)


def one_layer(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scoring: Scoring, output: Tensor | None
) -> tuple[AlikeLayers, LayerTensors]:
    """Check the arguments of one attention layer that is computed alone. Return the `AlikeLayers` of this layer alone
    and the layer's kernel arguments. Raises ValueError if the arguments do not match."""
    caches = paged_caches(key_cache, value_cache)
    layers = AlikeLayers.of(query.shape, query.dtype, caches, scoring)
    return layers, layers.tensors(query, caches, output=output)


def paged_caches(key_cache: Tensor, value_cache: Tensor) -> PagedCaches:
    """Return the key cache and the value cache of a layer as kernel arguments. Raises ValueError if the shapes, dtypes
    or strides are not supported; see `check_caches`."""
    check_caches(key_cache, value_cache)
    return Strided.of(key_cache), Strided.of(value_cache)


def score_factor(scoring: Scoring) -> float:
    """Return the factor by which attention kernels multiply the dot product of a query and a key. It includes the
    factor log2(e), so that the softmax can use powers of two instead of e.

    With a softcap, the product is 2 * score / softcap (times log2(e)). The kernel needs this value because softcap *
    tanh(y) is softcap * (1 - 2 / (exp(2 * y) + 1)), which does not overflow for large y of either sign.
    """
    return scoring.scale * LOG2_E * (2 / scoring.softcap if scoring.softcap else 1)


def check_scoring(scoring: Scoring, num_heads: int) -> None:
    """Raise ValueError unless the attention parameters in `scoring` (scale, window, slopes, softcap, sinks) are valid
    for this number of query heads."""
    for name, numbers in (("alibi_slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        check_tensor(name, numbers, (num_heads,), torch.float32)
    if not scoring.scale > 0:
        raise ValueError(f"scale is {scoring.scale}; it must be greater than 0")
    if scoring.window < 0 or scoring.softcap < 0:
        raise ValueError(f"window is {scoring.window} and softcap {scoring.softcap}; neither may be negative")


def _check_queries(query_shape: tuple[int, ...], query_dtype: torch.dtype, cache: Tensor) -> None:
    num_kv_heads, head_dim = cache.shape[2:]
    if len(query_shape) != 3 or query_shape[2] != head_dim or query_shape[1] % num_kv_heads:
        raise ValueError(
            f"queries are {list(query_shape)}; these caches need [tokens, a multiple of {num_kv_heads} heads, "
            f"{head_dim}]"
        )
    num_groups = query_shape[1] // num_kv_heads
    most = tiles.max_groups(head_dim)
    if not 1 <= num_groups <= most:
        raise ValueError(f"{num_groups} query heads of {head_dim} share a KV head; make it 1 to {most}")
    if query_dtype not in FLOATS or cache.dtype not in (query_dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"queries are {query_dtype} and the caches {cache.dtype}; make queries float16, bfloat16 or float32, "
            "and the caches the same or float8_e4m3fn"
        )


@triton.jit
def prepare_queries(queries, score_factor, OPERAND: tl.constexpr):
    """Convert queries to the dtype in which dot products are computed. A query may be divided by a number to fit the
    range of this dtype. Return the converted queries, and for each query the factor by which its dot products must be
    multiplied; the factor includes `score_factor`."""
    factors = tl.full([queries.shape[0]], score_factor, tl.float32)
    wide = queries.to(tl.float32)
    if queries.dtype == tl.bfloat16 and tl.float16 == OPERAND:  # float16 has a smaller range than bfloat16
        peaks = tl.max(tl.abs(wide), axis=1)
        peaks = tl.where(peaks == 0.0, 1.0, peaks)
        factors *= peaks
        wide /= peaks[:, None]
    return wide.to(OPERAND), factors


@triton.jit
def load_slopes(weighing, factors, heads, is_head):
    """Load the ALiBi slopes of some query heads, multiplied by log2(e). If the model has no slopes, return a
    placeholder of the same shape, which the kernel does not use."""
    slopes = factors
    if weighing.slopes is not None:
        slopes = tl.load(weighing.slopes + heads, mask=is_head, other=0.0) * _LOG2_E
    return slopes


@triton.jit
def count_sinks(sums, highest, totals, weighing, heads, is_head):
    """Add the attention sinks of the heads, if the model has sinks, to the softmax state (sums, highest, totals) and
    return the new state.

    Sinks are added after all positions. So even if a sink is large, the weights of positions keep all bits of their
    dtype.
    """
    if weighing.sinks is not None:
        sinks = tl.load(weighing.sinks + heads, mask=is_head, other=0.0) * _LOG2_E
        new_highest = tl.maximum(highest, sinks)
        rescale = tl.exp2(highest - new_highest)
        sums *= rescale[:, None]
        totals = totals * rescale + tl.exp2(sinks - new_highest)
        highest = new_highest
    return sums, highest, totals


@triton.jit
def adjust_scores(scores, distances, slopes, weighing):
    """Apply softcap and ALiBi slopes to attention scores, if the model uses them. `distances` contains the distance, in
    positions, between each query and each key."""
    if weighing.cap is not None:  # tanh(y) is 1 - 2 / (exp(2 * y) + 1); scores are 2 * y, see `score_factor`
        scores = weighing.cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if weighing.slopes is not None:
        scores -= slopes[:, None] * distances.to(tl.float32)
    return scores


@triton.jit
def sees_blocks(pattern, queries, keys, heads):
    """Compute `pagewire.kernels.reference.sees_blocks` for some positions of queries and keys, and query heads. Only
    the last three operations are two-dimensional, which saves registers."""
    blocks = keys // pattern.block_size
    first_local = queries // pattern.block_size - pattern.num_local + 1
    rest = (pattern.stride - (pattern.first + heads * pattern.head_step) % pattern.stride) % pattern.stride
    return (blocks >= first_local) | (blocks % pattern.stride == rest)
