"""How the values of a head and position lie in a KV cache: as they are, or as integers with a scale behind them."""

import torch
from torch import Tensor

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
SCALED = torch.int8  # the dtype whose values are in units of a scale
_SCALE_BYTES = torch.float32.itemsize


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a cache of `dtype` that the values of a head and position take, their scale included."""
    return head_dim + _SCALE_BYTES if dtype == SCALED else head_dim


def head_dim_of(cache: Tensor) -> int:
    """The head_dim of a cache [..., row_size]."""
    return cache.shape[-1] - _SCALE_BYTES if cache.dtype == SCALED else cache.shape[-1]


def write_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache of `dtype` holds for values [..., head_dim]: [..., row_size].

    float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433) is
    rounded to nearest even; what lies beyond +-448 becomes that, and NaN stays NaN. int8 is rounded to units of a
    127th of a head's largest value, the scale; where a value is not finite, the scale is not and none of them is.
    """
    if dtype == torch.float8_e4m3fn:
        return values.float().clamp(-448.0, 448.0).to(dtype)
    if dtype != SCALED:
        return values.to(dtype)
    wide = values.float()
    # By a tensor: by a number, torch on a GPU multiplies by its inverse, and the last bit differs.
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_tensor(127.0)
    units = wide / scale
    rounded = torch.where(units.abs() < 127.5, units, 0.0).round()
    return torch.cat([rounded.to(dtype), scale.view(dtype)], dim=-1)


def read_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., head_dim] in `dtype` of what a cache holds, [..., row_size]."""
    if rows.dtype != SCALED:
        return rows.to(dtype)
    scale = rows[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-_SCALE_BYTES].to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)


class TokenRows:
    """A layer's keys or values with one row per position.

    Position `offset` of a block is cache row `block_id * block_stride + offset`. The rows between are other parts of
    the block; no index points at them.
    """

    def __init__(self, cache: Tensor) -> None:
        num_blocks, block_size, num_kv_heads, size = cache.shape
        block_stride, row_stride = cache.stride()[:2]
        if not cache[0].is_contiguous() or block_stride % row_stride:
            raise ValueError(f"KV cache of shape {tuple(cache.shape)} and strides {cache.stride()} is not block-major")
        num_rows = (num_blocks - 1) * (block_stride // row_stride) + block_size
        self._dtype = cache.dtype
        # [cache rows, num_kv_heads, row_size]; torch moves bytes, but not every type of them
        rows = cache.as_strided((num_rows, num_kv_heads, size), (row_stride, size, 1))
        self._rows = rows.view(torch.uint8) if cache.dtype in EIGHT_BITS else rows

    def write(self, indexes: Tensor, values: Tensor) -> Tensor:
        """Writes values [N, num_kv_heads, head_dim], and returns what will be read of them."""
        rows = write_rows(values, self._dtype)
        self._rows.index_copy_(0, indexes, rows.view(self._rows.dtype))
        return read_rows(rows, values.dtype)

    def read(self, indexes: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [N, num_kv_heads, head_dim]."""
        return read_rows(self._rows.index_select(0, indexes).view(self._dtype), dtype)
