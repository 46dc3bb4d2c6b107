"""The kernel that writes keys and values into the paged cache.

Specification: `pagewire.kernels.reference.reshape_and_cache`.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.launching import FLOATS, INTEGERS, Strided, check_tensor

BLOCK_SIZES = range(8, 256 + 1, 8)
HEAD_DIMS = range(16, 512 + 1, 8)
MAX_E4M3 = 448.0

_MAX_E4M3 = tl.constexpr(MAX_E4M3)
TILE_ELEMENTS = 2048  # per program: with 128 threads, two loads of 16 bytes each for keys and for values
_NUM_WARPS = 4


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the keys and values of a step's tokens to one layer's paged KV cache, in place. `slot_mapping` gives the
    cache position of each token.

    The kernel follows vLLM's kernel of the same name (Kwon et al., 2023, https://arxiv.org/abs/2309.06180).

    Args:
        key, value: [T, num_kv_heads, head_dim], float16, bfloat16 or float32; the last dimension dense.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype or of float8_e4m3fn;
            the last dimension dense, any other strides. float8_e4m3fn saturates.
        slot_mapping: [T], int32 or int64, `block_id * block_size + offset` of each token, without duplicates. A token
            with slot -1 is skipped.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    _check(key, value, key_cache, value_cache, slot_mapping)
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    padded_dim = triton.next_power_of_2(head_dim)
    tile_rows = TILE_ELEMENTS // padded_dim
    _reshape_and_cache_kernel[(triton.cdiv(num_tokens * num_heads, tile_rows),)](
        Strided.of(key),
        Strided.of(value),
        Strided.of(key_cache),
        Strided.of(value_cache),
        slot_mapping,
        num_tokens * num_heads,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=key_cache.shape[1],
        TILE_ROWS=tile_rows,
        num_warps=_NUM_WARPS,
    )


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError unless the two tensors are the key cache and value cache of one layer, with a block size,
    head_dim and dtype that the Triton kernels support."""
    sizes = ("num_blocks", "block_size", "num_kv_heads", "head_dim")
    check_tensor("key_cache", key_cache, sizes, key_cache.dtype, is_strided=True)
    check_tensor("value_cache", value_cache, tuple(key_cache.shape), key_cache.dtype, is_strided=True)
    _, block_size, _, head_dim = key_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}; choose a multiple of 8 from 8 to 256")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; the kernels support multiples of 8 from 16 to 512")


def _check(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    check_caches(key_cache, value_cache)
    check_tensor("slot_mapping", slot_mapping, ("T",), *INTEGERS)
    held = key_cache.dtype
    dtypes = FLOATS if held == torch.float8_e4m3fn else (held,)
    check_tensor("key", key, (len(slot_mapping), *key_cache.shape[2:]), *dtypes, is_strided=True)
    check_tensor("value", value, tuple(key.shape), key.dtype, is_strided=True)


@triton.jit(do_not_specialize=["num_rows"])
def _reshape_and_cache_kernel(
    key, value, key_cache, value_cache, slot_mapping, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Triton kernel that writes keys and values to the KV cache. Each program writes TILE_ROWS rows, and a row is one
    head of one token."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    heads = rows % NUM_HEADS
    slots = tl.load(slot_mapping + tokens, mask=rows < num_rows, other=-1)
    dims = tl.arange(0, PADDED_DIM)
    mask = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    blocks = (slots // BLOCK_SIZE).to(tl.int64)
    positions = slots % BLOCK_SIZE
    _store_rows(key, key_cache, tokens, blocks, positions, heads, dims, mask)
    _store_rows(value, value_cache, tokens, blocks, positions, heads, dims, mask)


@triton.jit
def _store_rows(source, cache, tokens, blocks, positions, heads, dims, mask):
    """Write the key or value heads of some tokens to their positions in a KV cache. The cache stores one row of `dims`
    elements for each head."""
    sources = tokens * source.strides[0] + heads * source.strides[1]
    targets = blocks * cache.strides[0] + positions * cache.strides[1] + heads * cache.strides[2]
    content = tl.load(source.data + sources[:, None] + dims[None, :], mask=mask, other=0.0)
    tl.store(cache.data + targets[:, None] + dims[None, :], cached(content, cache), mask=mask)


@triton.jit
def cached(x, cache):
    """Convert x to the dtype of a KV cache. For 8-bit floats, values that are too large become the largest finite
    value, and NaN stays NaN."""
    if cache.data.dtype.element_ty == tl.float8e4nv:
        wide = x.to(tl.float32)
        x = tl.clamp(wide, -_MAX_E4M3, _MAX_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.data.dtype.element_ty)
