"""The C kernels as functions on tensors. Each is specified by the function of its name in `kernels.reference`.

All tensors are on the CPU and of one dtype: float32, bfloat16 or float16. Arithmetic is in float32; what plain torch
would store in the dtype in between is rounded to it here too. Nothing is read or written before the arguments have been
checked, but indices inside tensors (block tables, slots) are trusted.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MAX_HEAD_DIM = 256


class _Step(ctypes.Structure):
    """Mirrors `attention_step` of source/kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "alibi_slopes")),
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


@dataclass(frozen=True, slots=True)
class PagedScoring:
    """How scores become weights: see `kernels.reference.paged_attention`."""

    scale: float
    window: int = 0
    alibi_slopes: Tensor | None = None  # [num_heads] float32
    softcap: float = 0.0


class CpuKernels:
    """The loaded kernels. Calls release the interpreter's lock, and use as many threads as torch does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.variant.restype = ctypes.c_char_p
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        signatures = {
            "add_rms_norm": [pointer] * 4 + [integer] * 2 + [real, integer],
            "silu_mul": [pointer] * 2 + [integer] * 3,
            "norm_rope": [pointer] * 5 + [integer] * 4 + [real, integer],
            "store_kv": [pointer] * 5,
            "paged_attention": [pointer] * 5,
            "attend": [pointer] * 7,
        }
        self._functions: dict[tuple[str, torch.dtype], Callable[..., int | None]] = {}
        for name, argtypes in signatures.items():
            for dtype, suffix in _NAMES.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = argtypes
                function.restype = ctypes.c_int if name in ("paged_attention", "attend") else None
                self._functions[name, dtype] = function

    @property
    def variant(self) -> str:
        """What they were compiled to: "avx512_bf16", "avx512", "avx2" or "portable"."""
        return self._library.variant().decode()

    # Attention

    def store_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the keys and values of T tokens to their slots of one layer's cache, in place.

        Args:
            key, value: [T, num_kv_heads, head_dim]; tokens may be strided.
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
            slot_mapping: [T] integers, `block_id * block_size + offset`; a token of slot -1 is skipped.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
        """
        rows = PagedRows.of([0], [], torch.empty(0, 0), slot_mapping)
        step = _step(rows, PagedScoring(1.0), key, key, value, key_cache, value_cache)
        self._call("store_kv", key, ctypes.addressof(step), key, value, key_cache, value_cache)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Sequence[int],
        query_start_loc: Sequence[int],
        scale: float,
        window: int = 0,
        alibi_slopes: Tensor | None = None,
        softcap: float = 0.0,
        num_threads: int | None = None,
    ) -> Tensor:
        """Causal attention of S rows over one layer's paged cache, which already holds the rows' own keys and values.

        Rows of any number of queries, in any mix. Online softmax in float32 (Milakov and Gimelshein, 2018,
        https://arxiv.org/abs/1805.02867) over the pages as they lie.

        Args:
            query: [T, num_heads, head_dim], of the cache's dtype; tokens may be strided.
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last.
            block_tables: [S, max_blocks] integers. What lies past a row's end or before its window is not read.
            seq_lens, query_start_loc, scale, window, alibi_slopes, softcap: as in `kernels.reference`.
            num_threads: to use instead of torch's number.

        Returns:
            [T, num_heads, head_dim].

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is none for the list of what is to be done.
        """
        rows = PagedRows.of(query_start_loc, seq_lens, block_tables, torch.empty(0, dtype=torch.int64))
        scoring = PagedScoring(scale, window, alibi_slopes, softcap)
        step = _step(rows, scoring, query, None, None, key_cache, value_cache, num_threads)
        output = torch.empty(query.shape, dtype=query.dtype)
        self._call("paged_attention", query, ctypes.addressof(step), query, key_cache, value_cache, output)
        return output

    def attend(
        self,
        rows: PagedRows,
        scoring: PagedScoring,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """`store_kv` of a step's keys and values, then `paged_attention`: see there."""
        step = _step(rows, scoring, query, key, value, key_cache, value_cache)
        output = torch.empty(query.shape, dtype=query.dtype)
        self._call("attend", query, ctypes.addressof(step), query, key, value, key_cache, value_cache, output)
        return output

    # Between the matrix products

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps), rounded, times weight: [T, size] by [size] (https://arxiv.org/abs/1910.07467).

        Raises ValueError if shapes, strides or dtypes do not fit.
        """
        return self._add_rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x += update in place, both [T, size]; returns `rms_norm` of the sum. Raises ValueError as that does."""
        return self._add_rms_norm(x, update, weight, eps)

    def _add_rms_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        num_tokens, size = x.shape
        _check("x", x, x.dtype, (num_tokens, size))
        _check("weight", weight, x.dtype, (size,))
        if update is not None:
            _check("update", update, x.dtype, (num_tokens, size))
        output = torch.empty_like(x)
        self._call("add_rms_norm", x, x, update, weight, output, num_tokens, size, eps, torch.get_num_threads())
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [T, 2 * size], gates first, to [T, size] (https://arxiv.org/abs/2002.05202).

        Raises ValueError if the tensor is strided or of an odd size.
        """
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        _check("gate_up", gate_up, gate_up.dtype, (num_tokens, 2 * size))
        output = gate_up.new_empty(num_tokens, size)
        self._call("silu_mul", gate_up, gate_up, output, num_tokens, size, torch.get_num_threads())
        return output

    def norm_rope(
        self,
        heads: Tensor,
        num_heads: int,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalizes each head of queries and keys where it has a weight, then turns it by its position, in place.

        Args:
            heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; values stay.
            query_weight, key_weight: [head_dim] of `rms_norm`, or None.
            cos, sin: [T, head_dim] of pairs (i, i + head_dim / 2); the first half of the sines is negated.

        Returns:
            Views of `heads`: queries, keys and values.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
        """
        num_tokens, num_all_heads, head_dim = heads.shape
        num_kv_heads = (num_all_heads - num_heads) // 2
        if num_kv_heads < 1 or num_heads + 2 * num_kv_heads != num_all_heads or head_dim % 2:
            raise ValueError(
                f"heads are {tuple(heads.shape)} with {num_heads} of queries; as many of keys as of values are left, "
                "and head_dim is even"
            )
        _check("heads", heads, heads.dtype, tuple(heads.shape))
        for name, table in (("cos", cos), ("sin", sin)):
            _check(name, table, heads.dtype, (num_tokens, head_dim))
        for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
            if weight is not None:
                _check(name, weight, heads.dtype, (head_dim,))
        sizes = (num_tokens, num_heads, num_kv_heads, head_dim)
        self._call("norm_rope", heads, heads, query_weight, key_weight, cos, sin, *sizes, eps, torch.get_num_threads())
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return query, key, value

    def _call(self, name: str, typed: Tensor, *arguments: Tensor | int | float | None) -> None:
        """Calls the function for the dtype of `typed`; tensors go as pointers."""
        function = self._functions.get((name, typed.dtype))
        if function is None:
            raise ValueError(f"dtype {typed.dtype} has no kernels; use one of {', '.join(map(str, _NAMES))}")
        if function(*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]):
            raise MemoryError(f"no memory for {name} of {tuple(typed.shape)}")


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {dtype} {shape}, contiguous, on the CPU"
        )


def _check_heads(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Tokens may be strided, heads not."""
    strides = (shape[2], 1)
    is_dense = tensor.stride()[1:] == strides or not tensor.numel()
    if tensor.shape != shape or tensor.dtype != dtype or not is_dense or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"it must be {dtype} {shape} on the CPU, its heads one behind the other"
        )


def _step(
    rows: PagedRows,
    scoring: PagedScoring,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    num_threads: int | None = None,
) -> _Step:
    """Checks all arguments; the structure points into them and holds none of them."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    dtype = query.dtype
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != key_cache.shape or cache.shape[3] != head_dim or cache.dtype != dtype or cache.stride(3) != 1:
            raise ValueError(
                f"{name} is {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}; it must be {dtype} "
                f"[num_blocks, block_size, num_kv_heads, {head_dim}], the last dimension dense"
            )
    if head_dim > MAX_HEAD_DIM or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} over {num_kv_heads} KV heads; a multiple of the KV heads and at "
            f"most {MAX_HEAD_DIM} fit"
        )
    _check_heads("query", query, dtype, (num_tokens, num_heads, head_dim))
    step = _Step(
        query_start_loc=rows.query_start_loc.data_ptr(),
        seq_lens=rows.seq_lens.data_ptr(),
        block_tables=rows.block_tables.data_ptr(),
        slot_mapping=rows.slot_mapping.data_ptr(),
        num_tokens=num_tokens,
        num_rows=len(rows.seq_lens),
        max_blocks=rows.block_tables.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        query_token_stride=query.stride(0),
        window=scoring.window,
        num_threads=num_threads or torch.get_num_threads(),
        scale=scoring.scale,
        softcap=scoring.softcap,
    )
    step.key_block_stride, step.key_position_stride, step.key_head_stride = key_cache.stride()[:3]
    step.value_block_stride, step.value_position_stride, step.value_head_stride = value_cache.stride()[:3]
    if key is not None and value is not None:
        shape = (len(rows.slot_mapping), num_kv_heads, head_dim)
        _check_heads("key", key, dtype, shape)
        _check_heads("value", value, dtype, shape)
        step.fresh_key_token_stride, step.fresh_value_token_stride = key.stride(0), value.stride(0)
    if scoring.alibi_slopes is not None:
        _check("alibi_slopes", scoring.alibi_slopes, torch.float32, (num_heads,))
        step.alibi_slopes = scoring.alibi_slopes.data_ptr()
    return step
