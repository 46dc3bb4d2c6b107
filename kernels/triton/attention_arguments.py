"""The arguments of the attention kernels, how they follow from what callers pass, and what is refused."""

from collections import namedtuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.arguments import Scoring, Selection
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.cache import check_caches
from pagewire.kernels.triton.strided import Strided

LOG2_E = 1.4426950408889634
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(LOG2_E)
# Below every score and finite: where a tile has nothing to read, the difference of two infinities would be NaN.
LOWEST = tl.constexpr(-3.0e38)


# A `Scoring` in units of log 2: the factor of products (see `score_factor`), the softcap or None, and slopes and sinks,
# [num_heads] float32 in units of 1, or None.
Weighing = namedtuple("Weighing", "factor cap slopes sinks")
# What a kernel is compiled for: query heads that share a KV head, the size of a head and the power of two that holds
# it, positions of a block, rows of queries and positions of keys that a program takes at a time, and the type of the
# operands of its products.
AttentionShape = namedtuple("AttentionShape", "num_groups head_dim padded_dim block_size block_m block_n operand")


# What an attention kernel is launched with: the output; the arguments that all of them have, in their order, which are
# output, query, (keys, values), block_tables, the stride of these, seq_lens, window, (selected blocks, how many) and
# weighing, None where something is not there; the tile of the table; and what is passed by name, SHAPE among it. What
# lies by row stands alone: of what is in a tuple, Triton compiles a kernel again for other alignments.
AttentionLaunch = namedtuple("AttentionLaunch", "output arguments tile options")


def prepare_launch(
    kernel: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scoring: Scoring,
    selection: Selection | None,
    output: Tensor | None,
    window: int | None,
) -> AttentionLaunch:
    """Makes memory for the output where there is none. Raises ValueError unless all of it fits together.

    `kernel`: as `tiles.lookup` names it. `window`: as the kernel takes it.
    """
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    check_tensors(query, key_cache, value_cache, output)
    (num_heads, head_dim), (block_size, num_kv_heads) = query.shape[1:], key_cache.shape[1:3]
    num_rows = seq_lens.numel() if kernel == "paged_prefill" else query.shape[0]
    check_integers("block_tables", block_tables, (num_rows, block_tables.shape[-1]))
    check_integers("seq_lens", seq_lens, (num_rows,))
    selected = None
    if selection is not None:
        check_integers("selected_blocks", selection.blocks, (num_rows, num_kv_heads, selection.blocks.shape[-1]))
        check_integers("num_selected", selection.num_blocks, (num_rows, num_kv_heads))
        selected = (Strided.of(selection.blocks), selection.num_blocks)
    check_scoring(scoring, num_heads)
    num_groups, padded_dim = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    tile = tiles.lookup(kernel, head_dim=head_dim, num_groups=num_groups, dtype=key_cache.dtype)
    operands = operand(query.dtype, key_cache.dtype)
    shape = AttentionShape(num_groups, head_dim, padded_dim, block_size, tile.block_m, tile.block_n, operands)
    cap = scoring.softcap * LOG2_E if scoring.softcap else None
    arguments = (
        *(Strided.of(output), Strided.of(query), (Strided.of(key_cache), Strided.of(value_cache))),
        *(block_tables, block_tables.stride(0), seq_lens, window),
        *(selected, Weighing(score_factor(scoring), cap, scoring.alibi_slopes, scoring.sinks)),
    )
    options = {"SHAPE": shape, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return AttentionLaunch(output, arguments, tile, options)


def score_factor(scoring: Scoring) -> float:
    """Return the factor that makes products scores in units of log 2, or, with a cap, 2 * score / softcap in these
    units.

    softcap * tanh(y) is then softcap * (1 - 2 / (exp(2 * y) + 1)), which overflows at neither end.
    """
    return scoring.scale * LOG2_E * (2 / scoring.softcap if scoring.softcap else 1)


def operand(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> object:
    """The type of the operands of products.

    8-bit floats become float16, exactly and in fewer instructions than bfloat16 takes. The interpreter cannot multiply
    bfloat16.
    """
    if query_dtype == torch.bfloat16 and cache_dtype == torch.float8_e4m3fn:
        return tl.float16
    if query_dtype == torch.bfloat16 and _INTERPRETED:
        return tl.float32
    return FLOATS[query_dtype]


def check_scoring(scoring: Scoring, num_heads: int) -> None:
    """Raises ValueError unless it is for so many heads."""
    for name, numbers in (("alibi_slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        if numbers is not None and (
            numbers.shape != (num_heads,) or numbers.dtype != torch.float32 or not numbers.is_contiguous()
        ):
            raise ValueError(
                f"{name} are {list(numbers.shape)} {numbers.dtype}; make them [{num_heads}] float32, dense"
            )
    if not scoring.scale > 0:
        raise ValueError(f"scale is {scoring.scale}; it must be greater than 0")
    if scoring.window < 0 or scoring.softcap < 0:
        raise ValueError(f"window is {scoring.window} and softcap {scoring.softcap}; neither may be negative")


def check_tensors(query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor) -> None:
    """Raises ValueError unless queries fit the caches, and the output the queries."""
    check_caches(key_cache, value_cache)
    num_kv_heads, head_dim = key_cache.shape[2:]
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"queries are {list(query.shape)}; these caches take [tokens, a multiple of {num_kv_heads} heads, "
            f"{head_dim}]"
        )
    num_groups = query.shape[1] // num_kv_heads
    if not 1 <= num_groups <= tiles.MAX_GROUPS:
        raise ValueError(f"{num_groups} query heads share a KV head; it must be 1 to {tiles.MAX_GROUPS}")
    if query.dtype not in FLOATS or key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"queries hold {query.dtype} and the caches {key_cache.dtype}; make queries float16, bfloat16 or float32, "
            "and the caches the same or float8_e4m3fn"
        )
    if output.shape != query.shape or output.dtype != query.dtype:
        raise ValueError(
            f"the output is {list(output.shape)} {output.dtype}; make it {list(query.shape)} {query.dtype}, like the "
            "queries"
        )
    if query.stride(2) != 1 or output.stride(2) != 1:
        raise ValueError(
            f"the last dimension of queries and output has strides {query.stride(2)} and {output.stride(2)}; "
            "make it dense"
        )


def check_integers(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the tensor is int32, of this shape and dense; a block table's rows may lie apart."""
    is_dense = tensor.stride(-1) == 1 if name == "block_tables" else tensor.is_contiguous()
    if tuple(tensor.shape) != shape or tensor.dtype != torch.int32 or not is_dense:
        raise ValueError(
            f"{name} are {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; "
            f"make them {list(shape)} torch.int32, dense"
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
