"""The layout of one cache row: the values of one KV head at one position.

A row contains the values as they are, or 8-bit integers followed by their scale.
"""

import math

import torch
from torch import Tensor

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
SCALED = torch.int8  # the dtype of rows that have a scale
_SCALE_BYTES = torch.float32.itemsize


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements in one row of a KV cache. A row stores the values of one head at one position. If
    `dtype` is int8, the row also contains the bytes of a float32 scale."""
    return head_dim + _SCALE_BYTES if dtype == SCALED else head_dim


def head_dim_of(cache: Tensor) -> int:
    """Return the number of values in each head (head_dim) of a KV cache of shape [..., row_size]. The scale at the end
    of a row is not counted."""
    return cache.shape[-1] - _SCALE_BYTES if cache.dtype == SCALED else cache.shape[-1]


def write_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert key or value heads [..., head_dim] to KV cache rows [..., row_size] of `dtype`.

    float8_e4m3fn (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433): values
    are rounded to nearest even and saturated at +-448; NaN stays NaN. int8: the scale is the largest absolute value of
    the head divided by 127, and values are rounded to multiples of the scale. If a head contains infinity or NaN, its
    scale is infinite or NaN too, and no value read from the row is finite.
    """
    if dtype == torch.float8_e4m3fn:
        return values.float().clamp(-448.0, 448.0).to(dtype)
    if dtype != SCALED:
        return values.to(dtype)
    wide = values.float()
    # Divide by a tensor: for division by a number, torch on a GPU multiplies by the inverse, and the last bit differs.
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_tensor(127.0)
    units = wide / scale
    rounded = torch.where(units.abs() < 127.5, units, 0.0).round()
    return torch.cat([rounded.to(dtype), scale.view(dtype)], dim=-1)


def read_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert KV cache rows [..., row_size] back to key or value heads [..., head_dim] in `dtype`."""
    if rows.dtype != SCALED:
        return rows.to(dtype)
    scale = rows[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-_SCALE_BYTES].to(torch.promote_types(dtype, torch.float32)) * scale).to(dtype)


class TokenRows:
    """The key cache or the value cache of one layer as one long table, so that torch can read and write tokens by
    index.

    A row of the table is as wide as the heads of one position, or narrower, such that blocks and positions begin at
    whole rows. The rows of position `offset` of block `block_id` begin at `block_id * block_stride + offset *
    position_stride`. If blocks are further apart than their positions need, the table also has rows between the blocks.
    No index may refer to these rows.
    """

    block_stride: int  # rows
    position_stride: int  # rows; those of one position

    def __init__(self, cache: Tensor) -> None:
        num_blocks, block_size, num_kv_heads, size = cache.shape
        if not cache[0].is_contiguous():
            raise ValueError(f"KV cache of shape {tuple(cache.shape)} and strides {cache.stride()} is not block-major")
        width = math.gcd(cache.stride(0), num_kv_heads * size)
        self.block_stride, self.position_stride = cache.stride(0) // width, num_kv_heads * size // width
        num_rows = (num_blocks - 1) * self.block_stride + block_size * self.position_stride
        self._dtype, self._heads = cache.dtype, (num_kv_heads, size)
        # Index operations of torch do not support all 8-bit types, hence the view as bytes.
        rows = cache.as_strided((num_rows, width), (width, 1))
        self._rows = rows.view(torch.uint8) if cache.dtype in EIGHT_BITS else rows

    def write(self, indexes: Tensor, values: Tensor) -> Tensor:
        """Write the key or value heads of N tokens, [N, num_kv_heads, head_dim], to the rows from `indexes` [N] on.
        Return the values after rounding to the cache's dtype, as a later `read` returns them."""
        rows = write_rows(values, self._dtype)
        self._rows.index_copy_(0, self._all(indexes), rows.view(self._rows.dtype).view(-1, self._rows.shape[1]))
        return read_rows(rows, values.dtype)

    def read(self, indexes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the key or value heads of N tokens, [N, num_kv_heads, head_dim], from the rows from `indexes` [N] on.
        The values are converted to `dtype`."""
        rows = self._rows.index_select(0, self._all(indexes)).view(len(indexes), *self._heads)
        return read_rows(rows.view(self._dtype), dtype)

    def _all(self, indexes: Tensor) -> Tensor:
        """Return the indexes of all rows of some positions, given the index of the first row of each."""
        if self.position_stride == 1:
            return indexes
        return (indexes[:, None] + torch.arange(self.position_stride, device=indexes.device)).flatten()
