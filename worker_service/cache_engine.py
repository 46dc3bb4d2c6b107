"""From block ids to memory: sizes the pool of device blocks and holds the KV cache. It knows no owner.

One allocation, block-major: a block's K and V of all layers lie together, so moving a block is moving one contiguous
piece. Each layer sees its part as two views with the block index outermost. Block 0 is padding and stays zero.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_service.attention import LayerCache

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MAX_DEFAULT_CPU_BYTES = 4 * _GIB
_DEFAULT_CPU_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one block is made of."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class CacheEngine:
    """The KV cache: `layers[i]` is (key_cache, value_cache), each [num_blocks + 1, block_size, num_kv_heads, head_dim].

    Only block 0 is written here. Whatever the others hold, NaN included, is read by nobody before it is written.
    """

    def __init__(self, shape: CacheShape, num_device_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_device_blocks = num_device_blocks
        sizes = (num_device_blocks + 1, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.storage = torch.empty(sizes, dtype=shape.dtype, device=device)
        self.storage[0] = 0
        self.layers: list[LayerCache] = [
            (self.storage[:, layer, 0], self.storage[:, layer, 1]) for layer in range(shape.num_layers)
        ]


def cpu_cache_bytes(available_bytes: int) -> int:
    """What the KV cache may take of a CPU's memory when nobody says: a modest part, it is shared with all else."""
    return min(_MAX_DEFAULT_CPU_BYTES, int(available_bytes * _DEFAULT_CPU_SHARE))


def gpu_cache_bytes(*, total_bytes: int, used_bytes: int, utilization: float) -> int:
    """What is left for the KV cache: the allowed part of the memory less all that is used at a step's peak."""
    return int(total_bytes * utilization) - used_bytes


def count_blocks(*, cache_bytes: int, block_bytes: int, max_num_blocks: int, remedy: str) -> int:
    """Usable blocks that fit in `cache_bytes`, block 0 taken off, at most `max_num_blocks`.

    Raises ValueError with what would have been needed and the remedy if there is room for none.
    """
    num_blocks = min(cache_bytes // block_bytes - 1, max_num_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"the KV cache may take {max(cache_bytes, 0) / _GIB:.3f} GiB, two blocks take "
            f"{2 * block_bytes / _GIB:.3f} GiB; {remedy}"
        )
    return num_blocks


def log_size(shape: CacheShape, num_device_blocks: int, max_model_len: int) -> None:
    num_positions = num_device_blocks * shape.block_size
    logger.info(
        "KV cache: %d blocks, %d tokens, %.2f x max_model_len (%d), %.3f GiB",
        num_device_blocks,
        num_positions,
        num_positions / max_model_len,
        max_model_len,
        (num_device_blocks + 1) * shape.block_bytes / _GIB,
    )
    if num_positions < max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, less than one sequence of max_model_len %d: longer requests are refused; "
            "raise the memory or lower --max-model-len",
            num_positions,
            max_model_len,
        )


def available_cpu_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if that is tighter."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and usage.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(usage.read_text()))
    return available
