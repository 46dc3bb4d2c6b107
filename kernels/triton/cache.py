"""Writing keys and values into the paged cache. Specification: `pagewire.kernels.reference.reshape_and_cache`."""

import torch
from torch import Tensor

import triton
import triton.language as tl

BLOCK_SIZES = range(16, 256 + 1, 16)
HEAD_DIMS = range(32, 256 + 1, 8)
MAX_E4M3 = 448.0

_MAX_E4M3 = tl.constexpr(MAX_E4M3)
TILE_ELEMENTS = 2048  # of a program: with 128 threads, two loads of 16 bytes each of keys and of values
_NUM_WARPS = 4


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Writes the keys and values of a step's tokens to their slots of one layer's cache, in place.

    After vLLM's kernel of the same name (Kwon et al., 2023, https://arxiv.org/abs/2309.06180).

    Args:
        key, value: [T, num_kv_heads, head_dim], float16, bfloat16 or float32; the last dimension dense.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype or of float8_e4m3fn;
            the last dimension dense, any other strides.
        slot_mapping: [T], int32 or int64, `block_id * block_size + offset` of each token, no slot twice; a token of
            slot -1 is skipped.
        key_scale, value_scale: > 0; a cache of float8_e4m3fn holds what was given times 1 / scale, saturated.

    Raises:
        ValueError: a shape, dtype or scale is not one of these.
    """
    _check(key, value, key_cache, value_cache, slot_mapping)
    is_quantized = key_cache.dtype == torch.float8_e4m3fn
    check_scales(key_cache.dtype, key_scale, value_scale)
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    padded_dim = triton.next_power_of_2(head_dim)
    tile_rows = TILE_ELEMENTS // padded_dim
    _reshape_and_cache_kernel[(triton.cdiv(num_tokens * num_heads, tile_rows),)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens * num_heads,
        1.0 / key_scale,
        1.0 / value_scale,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=key_cache.shape[1],
        TILE_ROWS=tile_rows,
        IS_QUANTIZED=is_quantized,
        num_warps=_NUM_WARPS,
    )


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises ValueError unless these are the two caches of a layer, as the kernels of this package read them."""
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"the caches are {list(key_cache.shape)} and {list(value_cache.shape)}; "
            "make both [num_blocks, block_size, num_kv_heads, head_dim]"
        )
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(f"the caches hold {key_cache.dtype} and {value_cache.dtype}; make both hold the same")
    _, block_size, _, head_dim = key_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; choose a multiple of 16 from 16 to 256")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; the kernels take multiples of 8 from 32 to 256")
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError(
            f"the last dimension of the caches has strides {key_cache.stride(3)} and {value_cache.stride(3)}; "
            "lay each head's vector out densely"
        )


def check_scales(cache_dtype: torch.dtype, key_scale: float, value_scale: float) -> None:
    """Raises ValueError unless both scales are positive, and 1 where the cache holds no 8-bit floats."""
    if not (key_scale > 0.0 and value_scale > 0.0):
        raise ValueError(f"the scales are {key_scale} and {value_scale}; both must be greater than 0")
    if cache_dtype != torch.float8_e4m3fn and (key_scale, value_scale) != (1.0, 1.0):
        raise ValueError(
            f"the scales are {key_scale} and {value_scale} and the caches hold {cache_dtype}; "
            "scales are for caches of torch.float8_e4m3fn, leave them at 1"
        )


def _check(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    check_caches(key_cache, value_cache)
    expected = (slot_mapping.numel(), *key_cache.shape[2:])
    if slot_mapping.dim() != 1 or key.shape != expected or value.shape != expected:
        raise ValueError(
            f"keys are {list(key.shape)}, values {list(value.shape)}, slots {list(slot_mapping.shape)}; the caches "
            f"take keys and values of {list(expected)}, one slot each"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64) or not slot_mapping.is_contiguous():
        raise ValueError(f"slots are {slot_mapping.dtype}; make them torch.int32 or torch.int64, contiguous")
    if key.dtype != value.dtype or key_cache.dtype not in (key.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"keys hold {key.dtype}, values {value.dtype}, the caches {key_cache.dtype}; the caches take their own "
            "dtype, and those of torch.float8_e4m3fn any"
        )
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(
            f"the last dimension of keys and values has strides {key.stride(2)} and {value.stride(2)}; make it dense"
        )


@triton.jit(do_not_specialize=["num_rows"])
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    num_rows,
    inverse_key_scale,
    inverse_value_scale,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_cache_stride_block,
    key_cache_stride_position,
    key_cache_stride_head,
    value_cache_stride_block,
    value_cache_stride_position,
    value_cache_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    """A row is one head of one token; a program writes TILE_ROWS of them."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = rows % NUM_HEADS
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1)
    dims = tl.arange(0, PADDED_DIM)
    mask = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    blocks = (slots // BLOCK_SIZE).to(tl.int64)
    positions = slots % BLOCK_SIZE

    sources = tokens * key_stride_token + heads * key_stride_head
    targets = blocks * key_cache_stride_block + positions * key_cache_stride_position + heads * key_cache_stride_head
    keys = tl.load(key + sources[:, None] + dims[None, :], mask=mask, other=0.0)
    value_sources = tokens * value_stride_token + heads * value_stride_head
    values = tl.load(value + value_sources[:, None] + dims[None, :], mask=mask, other=0.0)
    if IS_QUANTIZED:
        keys = quantize(keys, inverse_key_scale)
        values = quantize(values, inverse_value_scale)
    tl.store(key_cache + targets[:, None] + dims[None, :], keys.to(key_cache.dtype.element_ty), mask=mask)
    targets = (
        blocks * value_cache_stride_block + positions * value_cache_stride_position + heads * value_cache_stride_head
    )
    tl.store(value_cache + targets[:, None] + dims[None, :], values.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def quantize(x, inverse_scale):
    """Saturated; a NaN stays one."""
    scaled = x.to(tl.float32) * inverse_scale
    return tl.clamp(scaled, -_MAX_E4M3, _MAX_E4M3, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
