"""One step's rows over a paged cache, as the C kernels take them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS, head_dim_of

MAX_HEAD_DIM = 256
# What a cache holds, in the order of source/kernels.c.
CACHE_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}


class PagedStep(ctypes.Structure):
    """Mirrors `attention_step` of source/kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "alibi_slopes", "sinks")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_rows", "max_blocks", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "block_size")),
        *((f"key_{name}_stride", ctypes.c_int64) for name in ("block", "position", "head")),
        *((f"value_{name}_stride", ctypes.c_int64) for name in ("block", "position", "head")),
        *((f"{name}_token_stride", ctypes.c_int64) for name in ("query", "fresh_key", "fresh_value")),
        *((name, ctypes.c_int64) for name in ("window", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@dataclass(frozen=True, slots=True)
class PagedRows:
    """One step's rows over a paged cache. Row i's tokens are the last of its seq_lens[i] positions.

    Build it with `of`, once a step; the layers share it.
    """

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset of each token; -1: not stored

    @staticmethod
    def of(
        query_start_loc: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, slot_mapping: Tensor
    ) -> "PagedRows":
        """Raises ValueError if the lengths do not fit each other."""
        if len(query_start_loc) != len(seq_lens) + 1 or len(block_tables) != len(seq_lens):
            raise ValueError(
                f"{len(seq_lens)} rows need as many block tables and one more start, "
                f"not {len(block_tables)} and {len(query_start_loc)}"
            )
        return PagedRows(
            torch.tensor(query_start_loc, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            block_tables.to(torch.int32).contiguous(),
            slot_mapping.to(torch.int64).contiguous(),
        )


NO_ROWS = PagedRows.of([0], [], torch.empty(0, 0), torch.empty(0))


def put_rows(step: PagedStep, rows: PagedRows, num_tokens: int) -> None:
    """Points a step to its rows, which it does not hold."""
    step.query_start_loc, step.seq_lens = rows.query_start_loc.data_ptr(), rows.seq_lens.data_ptr()
    step.block_tables, step.slot_mapping = rows.block_tables.data_ptr(), rows.slot_mapping.data_ptr()
    step.num_tokens, step.num_rows, step.max_blocks = num_tokens, len(rows.seq_lens), rows.block_tables.shape[1]
    step.num_threads = torch.get_num_threads()


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {dtype} {shape}, contiguous, on the CPU"
        )


def check_heads(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Tokens may be strided, heads not."""
    strides = (shape[2], 1)
    is_dense = tensor.stride()[1:] == strides or not tensor.numel()
    if tensor.shape != shape or tensor.dtype != dtype or not is_dense or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {dtype} {shape} on the CPU, its heads one behind the other"
        )


def paged_step(
    rows: PagedRows,
    scoring: Scoring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> PagedStep:
    """Checks all arguments; the structure points into them and holds none of them."""
    num_tokens, num_heads, head_dim = query.shape
    is_any = query.dtype == torch.float32 or key_cache.dtype in EIGHT_BITS
    dtype = query.dtype if is_any else key_cache.dtype
    check_heads("query", query, dtype, (num_tokens, num_heads, head_dim_of(key_cache)))
    step = cache_step(rows, scoring, num_tokens, num_heads, query.stride(0), key_cache, value_cache)
    shape = (len(rows.slot_mapping), key_cache.shape[2], head_dim)
    check_heads("key", key, query.dtype, shape)
    check_heads("value", value, query.dtype, shape)
    step.fresh_key_token_stride, step.fresh_value_token_stride = key.stride(0), value.stride(0)
    return step


def cache_step(
    rows: PagedRows,
    scoring: Scoring,
    num_tokens: int,
    num_heads: int,
    query_token_stride: int,
    key_cache: Tensor,
    value_cache: Tensor,
) -> PagedStep:
    """`paged_step` for queries that are not there yet, and without fresh keys and values."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    head_dim = head_dim_of(key_cache)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != key_cache.shape or cache.dtype != key_cache.dtype or cache.stride(3) != 1:
            raise ValueError(
                f"{name} is {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}; it must be "
                f"{key_cache.dtype} {tuple(key_cache.shape)}, the last dimension dense"
            )
    if head_dim > MAX_HEAD_DIM or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} over {num_kv_heads} KV heads; a multiple of the KV heads and at "
            f"most {MAX_HEAD_DIM} fit"
        )
    step = PagedStep(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        query_token_stride=query_token_stride,
        window=scoring.window,
        scale=scoring.scale,
        softcap=scoring.softcap,
    )
    put_rows(step, rows, num_tokens)
    step.key_block_stride, step.key_position_stride, step.key_head_stride = key_cache.stride()[:3]
    step.value_block_stride, step.value_position_stride, step.value_head_stride = value_cache.stride()[:3]
    if scoring.alibi_slopes is not None:
        check("alibi_slopes", scoring.alibi_slopes, torch.float32, (num_heads,))
        step.alibi_slopes = scoring.alibi_slopes.data_ptr()
    if scoring.sinks is not None:
        check("sinks", scoring.sinks, torch.float32, (num_heads,))
        step.sinks = scoring.sinks.data_ptr()
    return step
