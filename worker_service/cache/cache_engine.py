"""From block ids to memory: sizes the pools, holds the KV cache, copies and moves blocks. It knows no owner.

One allocation per pool, block-major: a block's K and V of all layers lie together, so moving a block is moving one
contiguous piece, and blocks that follow each other at both ends are one piece too. Each layer sees its part of the
device pool as two views with the block index outermost. Block 0 of either pool is never named: on the device it is
padding and stays zero.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pagewire.common.wire.messages import StepPlan, WorkerProtocolError
from pagewire.kernels.cache_rows import row_size
from worker_service.attention import LayerCache
from worker_service.cache.host_moves import HostMoves
from worker_service.cache.stream_moves import StreamMoves
from worker_service.streams import Device

_MEASURED_BYTES = 32 << 20  # that one move of the measurement takes at most
_NUM_MEASUREMENTS = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The dimensions and the data type of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_head_major: bool = False  # each KV head's positions of a block lie together, else each position's heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.row_size * self.dtype.itemsize

    @property
    def row_size(self) -> int:
        """Elements that a head's values at a position take, with the scale that a cache of int8 has for them."""
        return row_size(self.head_dim, self.dtype)


class CacheEngine:
    """The KV cache: `layers[i]` is (key_cache, value_cache), each [num_blocks + 1, block_size, num_kv_heads, row_size].

    Only block 0 is written here by itself. Whatever the others hold, NaN included, is not read before it is
    written. What a plan wants done with blocks is checked by `check` before any of it is done.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_device_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
        streams: Device | None = None,
    ) -> None:
        """`streams`: of an accelerator, which moves blocks beside what it computes. Without, everything is done in the
        order of the calls, and on a CPU before they return."""
        self.shape = shape
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        order = (shape.block_size, shape.num_kv_heads)
        sizes = (shape.num_layers, 2, *(reversed(order) if shape.is_head_major else order), shape.row_size)
        self.storage = torch.empty((num_device_blocks + 1, *sizes), dtype=shape.dtype, device=device)
        # [num_device_blocks + 1, num_layers, 2, block_size, num_kv_heads, row_size], however a block lies
        self._views = self.storage.transpose(3, 4) if shape.is_head_major else self.storage
        self.layers: list[LayerCache] = [
            (self._views[:, layer, 0], self._views[:, layer, 1]) for layer in range(shape.num_layers)
        ]
        blocks = self.storage.view(torch.uint8).flatten(1)  # [num_device_blocks + 1, block_bytes]
        blocks[0] = 0
        self._moves: HostMoves | StreamMoves = (
            HostMoves(blocks, num_host_blocks) if streams is None else StreamMoves(streams, blocks, num_host_blocks)
        )
        self._last_planned_step = 0

    def reset(self) -> None:
        """Begin an epoch, after everything that was started has been done."""
        self._moves.synchronize()
        self._moves.reset()
        self._last_planned_step = 0

    def check(self, plan: StepPlan) -> None:
        """Raises WorkerProtocolError for a move or copy that names no block, writes one twice, or undoes another."""
        num_device_blocks, num_host_blocks = self.num_device_blocks, self.num_host_blocks
        for name, sources, num_sources, targets, num_targets in (
            ("swap_out", plan.swap_out_device_blocks, num_device_blocks, plan.swap_out_host_blocks, num_host_blocks),
            ("swap_in", plan.swap_in_host_blocks, num_host_blocks, plan.swap_in_device_blocks, num_device_blocks),
            ("copy", plan.copy_source_blocks, num_device_blocks, plan.copy_target_blocks, num_device_blocks),
        ):
            if not sources and not targets:
                continue
            if len(sources) != len(targets):
                raise WorkerProtocolError(f"{name} names {len(sources)} blocks to read and {len(targets)} to write")
            _check_ids(f"{name} reads", sources, num_sources)
            _check_ids(f"{name} writes", targets, num_targets)
            if len(set(targets)) != len(targets):
                raise WorkerProtocolError(f"{name} writes a block twice")
        _check_moved_once("device", plan.swap_out_device_blocks, plan.swap_in_device_blocks)
        _check_moved_once("host", plan.swap_out_host_blocks, plan.swap_in_host_blocks)

    def move(self, plan: StepPlan) -> None:
        """Start the plan's moves, which begin after everything that was computed before. `plan` has been checked."""
        self._last_planned_step = plan.step
        if plan.swap_out_device_blocks or plan.swap_in_host_blocks:
            self._moves.start(plan)

    def copy(self, plan: StepPlan) -> None:
        """Copy between device blocks before anything else is computed. `plan` has been checked."""
        if plan.copy_source_blocks:
            self._moves.copy(plan.copy_source_blocks, plan.copy_target_blocks)

    def spoil(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Fill positions [start, end) of a row's table with NaN, so that no row that reads them yields a token."""
        block_size, position = self.shape.block_size, start
        while position < end:
            index = position // block_size
            last = min(end, (index + 1) * block_size)
            first = position - index * block_size
            content = self._views[int(block_ids[index]), :, :, first : last - index * block_size]
            # Of an integer all bits are set, in its scale too, which is NaN then.
            self._moves.run(partial(content.fill_, float("nan") if self.shape.dtype.is_floating_point else -1))
            position = last

    def last_moved_step(self) -> int:
        """The moves of all plans up to this step are done. Without streams they are when `move` returns."""
        return self._moves.last_done_step(self._last_planned_step)

    @property
    def is_moving(self) -> bool:
        """Whether moves have been started that `last_moved_step` has not yet told of."""
        return self._moves.is_busy

    def measure_bandwidth(self) -> float:
        """Bytes per second between device and host: the median of a few moves of scattered blocks, either way.

        Whatever the blocks held is lost. Zero without host blocks.
        """
        if not self.num_host_blocks:
            return 0.0
        max_blocks = max(1, _MEASURED_BYTES // self.shape.block_bytes)
        device_ids = tuple(range(1, min(self.num_device_blocks, self.num_host_blocks, max_blocks) + 1))
        host_ids = device_ids[::-1]  # no two blocks make one piece, as in pools that have been in use
        out = StepPlan(0, 0, swap_out_device_blocks=device_ids, swap_out_host_blocks=host_ids)
        back = StepPlan(0, 0, swap_in_host_blocks=host_ids, swap_in_device_blocks=device_ids)
        self._time(out)  # the first one touches the memory
        seconds = [self._time(plan) for plan in (out, back) * _NUM_MEASUREMENTS]
        self.reset()
        return len(device_ids) * self.shape.block_bytes / statistics.median(seconds)

    def _time(self, plan: StepPlan) -> float:
        """Seconds that the plan's moves take."""
        started = time.perf_counter()
        self.move(plan)
        self._moves.synchronize()
        return time.perf_counter() - started


def _check_ids(what: str, block_ids: Sequence[int], num_blocks: int) -> None:
    if min(block_ids) < 1 or max(block_ids) > num_blocks:
        ids = f"ids are 1 to {num_blocks}" if num_blocks else "there are none"
        raise WorkerProtocolError(f"{what} blocks {min(block_ids)} to {max(block_ids)}; {ids}")


def _check_moved_once(where: str, swapped_out: Sequence[int], swapped_in: Sequence[int]) -> None:
    """Both ends of a move are held until it is done: no other may write what it reads, or read what it writes."""
    both = swapped_out and swapped_in and set(swapped_out).intersection(swapped_in)
    if both:
        raise WorkerProtocolError(f"{where} block {min(both)} is swapped out and in by one plan")
