"""The arguments of the attention kernels, how they follow from what callers pass, and what is refused."""

from collections import namedtuple
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.arguments import Scoring, Selection
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.cache import check_caches
from pagewire.kernels.triton.launching import ALIGNMENT, FLOATS, RepeatedLaunch, Strided, check_tensor, operand

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
# Below every score and finite: where a tile has nothing to read, the difference of two infinities would be NaN.
LOWEST = tl.constexpr(-3.0e38)


# A `Scoring` in units of log 2: the factor of products (see `score_factor`), the softcap or None, and slopes and sinks,
# [num_heads] float32 in units of 1, or None.
Weighing = namedtuple("Weighing", "factor cap slopes sinks")
# What a kernel is compiled for: query heads that share a KV head, the size of a head and the power of two that holds
# it, positions of a block, rows of queries and positions of keys that a program takes at a time, and the type of the
# operands of its products.
AttentionConstants = namedtuple(
    "AttentionConstants", "num_groups head_dim padded_dim block_size block_m block_n operand"
)


# Keys and values of a layer.
PagedCaches = tuple[Strided, Strided]


class LayerTensors(NamedTuple):
    """What differs from layer to layer of a step, as the attention kernels take it, and of which kind it is: see
    `RepeatedLaunch`."""

    output: Strided
    query: Strided
    caches: PagedCaches
    weighing: Weighing
    kind: Hashable


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a step that score alike, but for their sinks: what they have in common is checked once for them all.

    Attributes:
        query_shape: [T, num_heads, head_dim].
        cache_shape: of keys and of values, [num_blocks, block_size, num_kv_heads, head_dim].
        weighing: with the sinks of `scoring`.
    """

    query_shape: tuple[int, ...]
    query_dtype: torch.dtype
    cache_shape: tuple[int, ...]
    cache_dtype: torch.dtype
    scoring: Scoring
    weighing: Weighing

    @staticmethod
    def of(
        query_shape: tuple[int, ...], query_dtype: torch.dtype, caches: PagedCaches, scoring: Scoring
    ) -> "LayerGroup":
        """Layers with queries of that shape and dtype, and caches like these. Raises ValueError unless they fit."""
        cache = caches[0].data
        _check_queries(query_shape, query_dtype, cache)
        check_scoring(scoring, query_shape[1])
        cap = scoring.softcap * LOG2_E if scoring.softcap else None
        weighing = Weighing(score_factor(scoring), cap, scoring.alibi_slopes, scoring.sinks)
        return LayerGroup(tuple(query_shape), query_dtype, tuple(cache.shape), cache.dtype, scoring, weighing)

    def launch(self, kernel: Any, name: str, grid: Callable[[AttentionConstants], tuple[int, int]]) -> RepeatedLaunch:
        """A launch of an attention kernel with the tile that `tiles.lookup` has for this name, on the grid of it."""
        _, num_heads, head_dim = self.query_shape
        num_groups = num_heads // self.cache_shape[2]
        tile = tiles.lookup(name, head_dim=head_dim, num_groups=num_groups, dtype=self.cache_dtype)
        sizes = (num_groups, head_dim, triton.next_power_of_2(head_dim), self.cache_shape[1])
        shape = AttentionConstants(*sizes, tile.block_m, tile.block_n, operand(self.query_dtype, self.cache_dtype))
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return RepeatedLaunch(kernel, (*grid(shape), 1), {"SHAPE": shape}, options)

    def rows(
        self, block_tables: Tensor, seq_lens: Tensor, num_rows: int, window: int | None, selection: Selection | None
    ) -> tuple[Any, ...]:
        """What all attention kernels are told of so many rows, in the order of their arguments: block_tables, the
        stride of these, seq_lens, `window` as it is, and (selected blocks, how many) or None.

        What lies by row stands alone: of what is in a tuple, Triton compiles a kernel again for other alignments.
        Raises ValueError unless it is of so many rows.
        """
        check_tensor("block_tables", block_tables, (num_rows, "max_blocks"), torch.int32, is_strided=True)
        check_tensor("seq_lens", seq_lens, (num_rows,), torch.int32)
        selected = None
        if selection is not None:
            num_kv_heads = self.cache_shape[2]
            check_tensor("selected_blocks", selection.blocks, (num_rows, num_kv_heads, "max_selected"), torch.int32)
            check_tensor("num_selected", selection.num_blocks, (num_rows, num_kv_heads), torch.int32)
            selected = (Strided.of(selection.blocks), selection.num_blocks)
        return block_tables, block_tables.stride(0), seq_lens, window, selected

    def tensors(
        self, query: Tensor, caches: PagedCaches, sinks: Tensor | None = None, output: Tensor | None = None
    ) -> LayerTensors:
        """Those of one layer, with memory for the output where there is none. Raises ValueError unless they fit.

        `sinks`: of this layer, [num_heads] float32; None: those of `scoring`.
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
) -> tuple[LayerGroup, LayerTensors]:
    """A layer that is a group of its own. Raises ValueError unless the arguments fit."""
    caches = paged_caches(key_cache, value_cache)
    group = LayerGroup.of(query.shape, query.dtype, caches, scoring)
    return group, group.tensors(query, caches, output=output)


def paged_caches(key_cache: Tensor, value_cache: Tensor) -> PagedCaches:
    """Keys and values of a layer as the attention kernels take them. Raises ValueError where `check_caches` does."""
    check_caches(key_cache, value_cache)
    return Strided.of(key_cache), Strided.of(value_cache)


def score_factor(scoring: Scoring) -> float:
    """Return the factor that makes products scores in units of log 2, or, with a cap, 2 * score / softcap in these
    units.

    softcap * tanh(y) is then softcap * (1 - 2 / (exp(2 * y) + 1)), which overflows at neither end.
    """
    return scoring.scale * LOG2_E * (2 / scoring.softcap if scoring.softcap else 1)


def check_scoring(scoring: Scoring, num_heads: int) -> None:
    """Raises ValueError unless it is for so many heads."""
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
            f"queries are {list(query_shape)}; these caches take [tokens, a multiple of {num_kv_heads} heads, "
            f"{head_dim}]"
        )
    num_groups = query_shape[1] // num_kv_heads
    if not 1 <= num_groups <= tiles.MAX_GROUPS:
        raise ValueError(f"{num_groups} query heads share a KV head; it must be 1 to {tiles.MAX_GROUPS}")
    if query_dtype not in FLOATS or cache.dtype not in (query_dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"queries hold {query_dtype} and the caches {cache.dtype}; make queries float16, bfloat16 or float32, "
            "and the caches the same or float8_e4m3fn"
        )


@triton.jit
def prepare_queries(queries, score_factor, OPERAND: tl.constexpr):
    """Queries as operands, and what their products are to be multiplied by."""
    factors = tl.full([queries.shape[0]], score_factor, tl.float32)
    wide = queries.to(tl.float32)
    if queries.dtype == tl.bfloat16 and tl.float16 == OPERAND:  # which does not hold all that bfloat16 does
        peaks = tl.max(tl.abs(wide), axis=1)
        peaks = tl.where(peaks == 0.0, 1.0, peaks)
        factors *= peaks
        wide /= peaks[:, None]
    return wide.to(OPERAND), factors


@triton.jit
def load_slopes(weighing, factors, heads, is_head):
    """The slopes of heads in units of log 2; where there are none, anything of their shape."""
    slopes = factors
    if weighing.slopes is not None:
        slopes = tl.load(weighing.slopes + heads, mask=is_head, other=0.0) * _LOG2_E
    return slopes


@triton.jit
def count_sinks(sums, highest, totals, weighing, heads, is_head):
    """What was read, and the sinks of its heads, where there are any: scores without a value. They come last, so that
    weights of positions keep all the bits of their type however high a sink is."""
    if weighing.sinks is not None:
        sinks = tl.load(weighing.sinks + heads, mask=is_head, other=0.0) * _LOG2_E
        new_highest = tl.maximum(highest, sinks)
        rescale = tl.exp2(highest - new_highest)
        sums *= rescale[:, None]
        totals = totals * rescale + tl.exp2(sinks - new_highest)
        highest = new_highest
    return sums, highest, totals


@triton.jit
def bend(scores, distances, slopes, weighing):
    """Scores as softcap and slopes change them, where there are any; distances are positions from key to query."""
    if weighing.cap is not None:  # tanh(y) as 1 - 2 / (exp(2 * y) + 1); scores are 2 * y, see `score_factor`
        scores = weighing.cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if weighing.slopes is not None:
        scores -= slopes[:, None] * distances.to(tl.float32)
    return scores
