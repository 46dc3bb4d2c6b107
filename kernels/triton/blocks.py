"""Kernels that copy, gather and scatter blocks of the cache, for all layers in one launch.

They do not depend on the content of a block. The cache may be any tensor whose first dimension is the block index: the
cache of one layer, the block-major allocation of all layers, or a layer-major allocation with its block dimension moved
to the front. Specifications: `pagewire.kernels.reference.copy_blocks`, `gather_blocks` and `scatter_blocks`.
"""

from collections import namedtuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.launching import INTEGERS, check_tensor

_WORD = torch.int32
CHUNK_WORDS = 2048  # words per program: with 128 threads, four loads of 16 bytes each
_NUM_WARPS = 4
_ALIGNMENT = 16  # bytes that a thread moves at once


def copy_blocks(cache: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy KV cache blocks within the cache, for example for copy-on-write: block source_ids[i] to block target_ids[i],
    for all i.

    Args:
        cache: [num_blocks, ...]. A block is one dense piece of memory, or several pieces of equal size at a constant
            distance.
        source_ids, target_ids: [N], int32 or int64, contiguous, on the cache's device. No block may be a target twice,
            or both a source and a target. If sources and targets overlap, gather the sources and scatter them instead.

    Raises:
        ValueError: a block has another layout, the size of its pieces is not a multiple of 16 bytes, or the ids have
            another shape or dtype.
    """
    for ids in (source_ids, target_ids):
        check_tensor("block ids", ids, (source_ids.numel(),), *INTEGERS)
    _launch(cache, source_ids, cache, target_ids)


def gather_blocks(cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copy KV cache blocks to a staging buffer: block block_ids[i] of the cache to staging[i], for all i.

    Args:
        cache: [num_blocks, ...], as in `copy_blocks`.
        block_ids: [N], int32 or int64, contiguous, on the cache's device.
        staging: [N, ...], with the shape and dtype of the cache's blocks and the same memory order of their dimensions.
            It must not overlap the cache, and is on the device or in pinned host memory.

    Raises:
        ValueError: as `copy_blocks`, or the two tensors do not match.
    """
    check_tensor("block ids", block_ids, (staging.shape[0],), *INTEGERS)
    _launch(cache, block_ids, staging, None)


def scatter_blocks(staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Copy KV cache blocks from a staging buffer to the cache: staging[i] to block block_ids[i], for all i. No block id
    may occur twice.

    The arguments and errors are the same as for `gather_blocks`.
    """
    check_tensor("block ids", block_ids, (staging.shape[0],), *INTEGERS)
    _launch(staging, None, cache, block_ids)


# The layout of a block in two tensors: dense pieces at constant distances. All sizes are in words.
_Pieces = namedtuple("_Pieces", "num_pieces piece_words source_stride target_stride")
# The source or the target of a copy: the start of its memory, the distance between blocks, in words, and the ids of the
# blocks, [N]. None: all blocks of the tensor in order.
_Blocks = namedtuple("_Blocks", "words stride ids")


def _launch(source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None) -> None:
    ids = target_ids if source_ids is None else source_ids
    pieces = _find_pieces(source, target)
    if ids is None or ids.numel() == 0:
        return
    chunks_per_piece = triton.cdiv(pieces.piece_words, CHUNK_WORDS)
    _copy_kernel[(ids.numel() * pieces.num_pieces * chunks_per_piece,)](
        _end(source, source_ids),
        _end(target, target_ids),
        pieces,
        chunks_per_piece,
        CHUNK_WORDS=CHUNK_WORDS,
        num_warps=_NUM_WARPS,
    )


def _end(blocks: Tensor, ids: Tensor | None) -> _Blocks:
    return _Blocks(_words(blocks), _to_words(blocks.stride(0), blocks.dtype), ids)


def _find_pieces(source: Tensor, target: Tensor) -> _Pieces:
    """Find a description of the memory of one KV cache block that applies to both tensors: a number of contiguous
    pieces of equal size, and the distance between pieces in each tensor.

    Raises ValueError if the blocks of the two tensors do not consist of the same pieces in the same order.
    """
    if source.dim() < 2 or source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"source blocks are {list(source.shape[1:])} {source.dtype}, target blocks {list(target.shape[1:])} "
            f"{target.dtype}; make them equal, with the block index as the first dimension"
        )
    strides = [(a, b, size) for a, b, size in zip(source.stride(), target.stride(), source.shape, strict=True)][1:]
    merged: list[tuple[int, int, int]] = []  # source stride, target stride, size; outermost first
    for inner in sorted((dim for dim in strides if dim[2] != 1), reverse=True):
        if merged and merged[-1][:2] == (inner[0] * inner[2], inner[1] * inner[2]):
            inner = (*inner[:2], inner[2] * merged.pop()[2])
        merged.append(inner)
    piece = merged.pop() if merged else (1, 1, 1)
    outer = merged.pop() if merged else (0, 0, 1)
    if merged or piece[:2] != (1, 1):
        raise ValueError(
            f"blocks have strides {source.stride()[1:]} and {target.stride()[1:]}; make them dense pieces of equal "
            "size at a constant distance, in the same order in both tensors"
        )
    dtype = source.dtype
    return _Pieces(outer[2], _to_words(piece[2], dtype), _to_words(outer[0], dtype), _to_words(outer[1], dtype))


def _to_words(num_elements: int, dtype: torch.dtype) -> int:
    num_bytes = num_elements * dtype.itemsize
    if num_bytes % _ALIGNMENT:
        raise ValueError(
            f"a piece of a block, or a distance between two, has {num_bytes} bytes; make it a multiple of {_ALIGNMENT}"
        )
    return num_bytes // _WORD.itemsize


def _words(blocks: Tensor) -> Tensor:
    """Return the beginning of a tensor's memory as 32-bit words, so that the copy kernel can address the whole tensor
    from it. The tensor may have any strides. Raises ValueError if the memory is not aligned to 16 bytes."""
    if blocks.data_ptr() % _ALIGNMENT:
        raise ValueError(f"blocks begin at address {blocks.data_ptr():#x}; make it a multiple of {_ALIGNMENT}")
    return blocks.as_strided((_ALIGNMENT // blocks.dtype.itemsize,), (1,)).view(_WORD)


@triton.jit
def _copy_kernel(source, target, pieces, chunks_per_piece, CHUNK_WORDS: tl.constexpr):
    """Triton kernel that copies KV cache blocks. A block consists of pieces of contiguous memory, and a piece of
    chunks. Each program copies one chunk."""
    chunk = tl.program_id(0) % chunks_per_piece
    piece = (tl.program_id(0) // chunks_per_piece % pieces.num_pieces).to(tl.int64)
    index = tl.program_id(0) // chunks_per_piece // pieces.num_pieces
    words = chunk * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
    mask = words < pieces.piece_words
    from_block, to_block = _block(source, index), _block(target, index)
    content = tl.load(source.words + from_block + piece * pieces.source_stride + words, mask=mask)
    tl.store(target.words + to_block + piece * pieces.target_stride + words, content, mask=mask)


@triton.jit
def _block(blocks, index):
    """Return the offset, in 32-bit words, at which a block begins in memory. `index` is the position of the block in
    the list of blocks to copy."""
    block = index.to(tl.int64)
    if blocks.ids is not None:
        block = tl.load(blocks.ids + index).to(tl.int64)
    return block * blocks.stride
