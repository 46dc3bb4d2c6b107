"""What the attention kernels take, what they make of it, and what they refuse."""

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.cache import check_caches, check_scales

LOG2_E = 1.4426950408889634
FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the keys and values of S rows lie, int32 on the device: as in `pagewire.kernels.reference`."""

    block_tables: Tensor
    seq_lens: Tensor
    selected_blocks: Tensor | None
    num_selected: Tensor | None

    @property
    def max_selected(self) -> int:
        return 0 if self.selected_blocks is None else self.selected_blocks.shape[-1]

    def check(self, num_rows: int, num_kv_heads: int) -> None:
        """Raises ValueError unless all are of this size, int32 and dense; block tables may lie apart."""
        check_integers("block_tables", self.block_tables, (num_rows, self.block_tables.shape[-1]))
        check_integers("seq_lens", self.seq_lens, (num_rows,))
        if (self.selected_blocks is None) != (self.num_selected is None):
            raise ValueError("one of selected_blocks and num_selected is given; give both or none")
        if self.selected_blocks is not None and self.num_selected is not None:
            check_integers("selected_blocks", self.selected_blocks, (num_rows, num_kv_heads, self.max_selected))
            check_integers("num_selected", self.num_selected, (num_rows, num_kv_heads))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How products become weights and weights results: as in `pagewire.kernels.reference.paged_attention`."""

    scale: float
    window: int
    alibi_slopes: Tensor | None
    softcap: float
    key_scale: float
    value_scale: float

    @property
    def score_factor(self) -> float:
        """What products are multiplied by: to scores in units of log 2, or, with a cap, to 2 * score / softcap in them.

        softcap * tanh(y) is then softcap * (1 - 2 / (exp(2 * y) + 1)), which overflows at neither end.
        """
        return self.scale * self.key_scale * LOG2_E * (2 / self.softcap if self.softcap else 1)

    @property
    def cap(self) -> float:
        """The softcap in units of log 2."""
        return self.softcap * LOG2_E

    def check(self, num_heads: int, cache_dtype: torch.dtype) -> None:
        """Raises ValueError unless it is for so many heads and for such caches."""
        check_scales(cache_dtype, self.key_scale, self.value_scale)
        slopes = self.alibi_slopes
        if slopes is not None and (
            slopes.shape != (num_heads,) or slopes.dtype != torch.float32 or not slopes.is_contiguous()
        ):
            raise ValueError(
                f"alibi_slopes are {list(slopes.shape)} {slopes.dtype}; make them [{num_heads}] float32, dense"
            )
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; it must be greater than 0")
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"window is {self.window} and softcap {self.softcap}; neither may be negative")


def operand(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> object:
    """What products are made of.

    8-bit floats become float16, exactly and in fewer instructions than bfloat16 takes. The interpreter cannot multiply
    bfloat16.
    """
    if query_dtype == torch.bfloat16 and cache_dtype == torch.float8_e4m3fn:
        return tl.float16
    if query_dtype == torch.bfloat16 and _INTERPRETED:
        return tl.float32
    return FLOATS[query_dtype]


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
