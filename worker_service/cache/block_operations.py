"""Operations that gather, scatter and copy blocks by their ids, on whatever device the blocks are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockOperations:
    """Blocks are rows of bytes, [num_blocks, block_bytes] uint8; ids are int64 on their device."""

    gather: Callable[[Tensor, Tensor, Tensor], None]  # (blocks, ids, staging): staging[i] = blocks[ids[i]]
    scatter: Callable[[Tensor, Tensor, Tensor], None]  # (staging, blocks, ids): blocks[ids[i]] = staging[i]
    # (blocks, source_ids, target_ids): blocks[target_ids[i]] = blocks[source_ids[i]]; no id on both sides.
    copy: Callable[[Tensor, Tensor, Tensor], None]


def create_block_operations(device: torch.device) -> BlockOperations:
    """Triton's kernels on CUDA, where a gather is one launch without memory of its own; plain torch elsewhere."""
    if device.type == "cuda":
        from pagewire.kernels.triton import blocks

        return BlockOperations(blocks.gather_blocks, blocks.scatter_blocks, blocks.copy_blocks)
    return BlockOperations(_gather, _scatter, _copy)


def _gather(blocks: Tensor, ids: Tensor, staging: Tensor) -> None:
    torch.index_select(blocks, 0, ids, out=staging)


def _scatter(staging: Tensor, blocks: Tensor, ids: Tensor) -> None:
    blocks.index_copy_(0, ids, staging)


def _copy(blocks: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    blocks.index_copy_(0, target_ids, blocks.index_select(0, source_ids))
