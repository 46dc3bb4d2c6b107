"""Moves of blocks between a device and its host, concurrent with the device's computation.

Blocks are scattered at both ends, and a bus is fast only for long transfers. So a swap-out gathers a chunk of blocks
into a dense staging buffer on the device, at the speed of the device's memory, and then transfers the buffer to the
host. A swap-in does a transfer and then a scatter. (A kernel that wrote to the host directly would occupy the device's
processors during the whole transfer and slow down the computation.)

The host end does no gather. Instead, a map assigns each host block id a place in the pool, which has one place for each
id. The targets of a swap-out lose their old content, so the swap-out reassigns their places in ascending order. An id
that is named for the first time gets the next unused place. Blocks that leave together are therefore adjacent wherever
the freed places are adjacent, and return in one transfer. In the worst case no places are adjacent, and each block is
one transfer, as it would be without the map.

The pool consists of slabs whose size is a power of two in bytes, since torch rounds each pinned allocation up to one.

A transfer is at most `_MAX_TRANSFER_BYTES` long. The few KB that each step sends to and from the device use the same
copy engines and wait for the transfer in progress.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire.common.wire.messages import StepPlan
from worker_service.streams import Device, Stream

_MAX_STAGING_BYTES = 32 << 20
_MAX_TRANSFER_BYTES = 8 << 20
_SLAB_BYTES = 1 << 30


def num_staging_blocks(num_host_blocks: int, block_bytes: int) -> int:
    """Return the number of KV cache blocks in a GPU's staging buffer. Blocks move to and from the host through it.

    The result is 0 if there are no host blocks.
    """
    return min(num_host_blocks, max(1, _MAX_STAGING_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class _BlockOperations:
    """The functions that gather, scatter and copy KV cache blocks on one device.

    The blocks are one tensor [num_blocks, block_bytes] uint8. Ids are int64 on the same device.
    """

    gather: Callable[[Tensor, Tensor, Tensor], None]  # (blocks, ids, staging): staging[i] = blocks[ids[i]]
    scatter: Callable[[Tensor, Tensor, Tensor], None]  # (staging, blocks, ids): blocks[ids[i]] = staging[i]
    # (blocks, source_ids, target_ids): blocks[target_ids[i]] = blocks[source_ids[i]]; no id is in both.
    copy: Callable[[Tensor, Tensor, Tensor], None]


def _block_operations(device: torch.device) -> _BlockOperations:
    """Return the functions that gather, scatter and copy blocks on `device`: Triton kernels on CUDA, else plain torch.

    The Triton kernel gathers blocks in one launch and allocates no memory.
    """
    if device.type == "cuda":
        from pagewire.kernels.triton import blocks

        return _BlockOperations(blocks.gather_blocks, blocks.scatter_blocks, blocks.copy_blocks)
    return _BlockOperations(_gather, _scatter, _copy)


def _gather(blocks: Tensor, ids: Tensor, staging: Tensor) -> None:
    torch.index_select(blocks, 0, ids, out=staging)


def _scatter(staging: Tensor, blocks: Tensor, ids: Tensor) -> None:
    blocks.index_copy_(0, ids, staging)


def _copy(blocks: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    blocks.index_copy_(0, target_ids, blocks.index_select(0, source_ids))


class _BlockIds:
    """Pinned host memory for lists of block ids that are copied to the GPU.

    Each list has its own memory, which is kept until a CUDA stream has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def put(self, ids: Sequence[int]) -> Tensor:
        """Copy block ids to pinned host memory and return it. A later operation copies the ids from there to the GPU.

        Call `hold` after the later operation has been added to its CUDA stream.
        """
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        pinned = self._device.pinned((len(ids),), torch.int64)
        pinned.copy_(torch.tensor(ids, dtype=torch.int64))
        return pinned

    def hold(self, pinned: Tensor, stream: Stream) -> torch.cuda.Event:
        """Keep a buffer of block ids alive until the CUDA stream has finished the operations queued so far.

        Return the CUDA event that marks this point.
        """
        event = stream.record()
        self._under_way.append((event, pinned))
        return event

    def reset(self) -> None:
        """Release all buffers of block ids. Every CUDA stream must have been synchronized."""
        self._under_way.clear()


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent KV cache blocks that one transfer copies between the staging buffer and the host pool.

    In the staging buffer they are `staging[first : first + num]`. In the host pool they are `num` adjacent places from
    `place` on, all in one slab (one allocation of the pool).
    """

    first: int
    place: int
    num: int


class StreamMoves:
    """Moves of KV cache blocks between a GPU and a pool of blocks in host memory, and copies of blocks on the GPU.

    The moves run on a CUDA stream of their own. The moves of a plan begin after all operations that were put on the
    compute stream earlier. No computation waits for moves. While a move is in progress, no plan may write a block that
    the move names, or read the move's target (S3 and S4 of ARCHITECTURE.md).
    """

    def __init__(self, device: Device, blocks: Tensor, num_host_blocks: int) -> None:
        """Allocate the host pool and the staging buffer.

        `blocks` is the device pool, [num_blocks + 1, block_bytes] uint8.
        """
        block_bytes = blocks.shape[1]
        self._device = device
        self._blocks = blocks
        self._operations = _block_operations(blocks.device)
        self._staging = blocks.new_empty((num_staging_blocks(num_host_blocks, block_bytes), block_bytes))
        self._slab_blocks = max(1, _SLAB_BYTES // block_bytes)
        self._slabs = [
            device.pinned((min(self._slab_blocks, num_host_blocks - first), block_bytes), torch.uint8)
            for first in range(0, num_host_blocks, self._slab_blocks)
        ]
        self._places: dict[int, int] = {}  # by host block that was ever named; the places are 0, 1, ... without gaps
        self._max_transfer_blocks = max(1, _MAX_TRANSFER_BYTES // block_bytes)
        self._ids = _BlockIds(device)
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()  # (step, event at which its moves are done)

    def start(self, plan: StepPlan) -> None:
        """Enqueue the plan's moves of KV cache blocks on the move stream.

        A block must not be both swapped out and swapped in.
        """
        stream = self._device.moves
        stream.wait_for(self._device.compute.record())
        out_places = self._reassign_places(plan.swap_out_host_blocks)
        in_order = sorted(
            (self._place(host), device)
            for host, device in zip(plan.swap_in_host_blocks, plan.swap_in_device_blocks, strict=True)
        )
        in_places = [place for place, _ in in_order]
        ids = self._ids.put([*plan.swap_out_device_blocks, *(device for _, device in in_order)])
        num_out, num_staged = len(out_places), len(self._staging)
        for first in range(0, num_out, num_staged):
            places = out_places[first : first + num_staged]
            stream.run(partial(self._swap_out, ids[first : first + len(places)], self._runs(places)))
        for first in range(0, len(in_places), num_staged):
            places = in_places[first : first + num_staged]
            start = num_out + first
            stream.run(partial(self._swap_in, ids[start : start + len(places)], self._runs(places)))
        self._pending.append((plan.step, self._ids.hold(ids, stream)))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy KV cache blocks within the GPU, before any later computation.

        All sources are read before any target is written.
        """
        ids = self._ids.put([*sources, *targets])
        self._device.compute.run(partial(self._copy, ids, not set(sources).isdisjoint(targets)))
        self._ids.hold(ids, self._device.compute)

    def run(self, operation: Callable[[], object]) -> None:
        """Enqueue an operation that writes to the KV cache blocks, so that it runs before any later computation."""
        self._device.compute.run(operation)

    def synchronize(self) -> None:
        """Wait until all operations on all streams of the GPU are done."""
        self._device.synchronize()

    def last_done_step(self, last_planned_step: int) -> int:
        """Return the number of the last step whose moves of KV cache blocks between GPU and host have finished.

        The moves of all earlier steps have finished too. If no moves are in progress, return `last_planned_step`.
        """
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        return self._pending[0][0] - 1 if self._pending else last_planned_step

    @property
    def is_busy(self) -> bool:
        """Whether any move of KV cache blocks between GPU and host is unfinished.

        The value stays True until `last_done_step` has reported that the moves have finished.
        """
        return bool(self._pending)

    def reset(self) -> None:
        """Begin a new session with a scheduler: forget all block moves and the places of blocks in the host pool.

        Every stream must have been synchronized. The old content of the blocks is not read again.
        """
        self._pending.clear()
        self._ids.reset()
        self._places.clear()

    def _host(self, place: int, num: int) -> Tensor:
        """Return the memory of `num` adjacent places of the host pool from `place` on, [num, block_bytes] uint8.

        All the places must be in one slab (one allocation of the pool).
        """
        slab, first = divmod(place, self._slab_blocks)
        return self._slabs[slab][first : first + num]

    def _place(self, host_block: int) -> int:
        return self._places.setdefault(host_block, len(self._places))

    def _reassign_places(self, host_blocks: Sequence[int]) -> list[int]:
        """Reassign the places that these host blocks have in the host pool, in ascending order. Return the places.

        Place i belongs to host_blocks[i]. Blocks that are swapped out together then often have adjacent places, so that
        one transfer can copy several of them.
        """
        places = sorted([self._place(host_block) for host_block in host_blocks])
        for host_block, place in zip(host_blocks, places, strict=True):
            self._places[host_block] = place
        return places

    def _runs(self, places: Sequence[int]) -> list[_Run]:
        return list(_find_runs(places, self._max_transfer_blocks, self._slab_blocks))

    def _copy(self, ids: Tensor, is_chained: bool) -> None:
        """Copy KV cache blocks on the GPU. `ids` are the ids of the sources, followed by the ids of the targets.

        Set `is_chained` if some block is both a source and a target. All sources are then read before any target is
        written.
        """
        source_ids, target_ids = ids.to(self._blocks.device, non_blocking=True).chunk(2)
        if is_chained:
            self._blocks.index_copy_(0, target_ids, self._blocks.index_select(0, source_ids))
        else:
            self._operations.copy(self._blocks, source_ids, target_ids)

    def _swap_out(self, ids: Tensor, runs: list[_Run]) -> None:
        staging = self._staging[: len(ids)]
        self._operations.gather(self._blocks, ids.to(self._blocks.device, non_blocking=True), staging)
        for run in runs:
            staged = staging[run.first : run.first + run.num]
            _transfer(staged, self._host(run.place, run.num))

    def _swap_in(self, ids: Tensor, runs: list[_Run]) -> None:
        staging = self._staging[: len(ids)]
        for run in runs:
            staged = staging[run.first : run.first + run.num]
            _transfer(self._host(run.place, run.num), staged)
        self._operations.scatter(staging, self._blocks, ids.to(self._blocks.device, non_blocking=True))


def _transfer(source: Tensor, target: Tensor) -> None:
    """Copy a run between the staging buffer and the host pool, in transfers of at most `_MAX_TRANSFER_BYTES`."""
    for read, written in zip(
        source.view(-1).split(_MAX_TRANSFER_BYTES), target.view(-1).split(_MAX_TRANSFER_BYTES), strict=True
    ):
        written.copy_(read, non_blocking=True)


def _find_runs(places: Sequence[int], max_blocks: int, slab_blocks: int) -> Iterator[_Run]:
    """Divide the places of blocks in the host pool into runs of adjacent places. Yield the runs in order.

    One transfer can copy a run: it is in one slab (one allocation of the pool) and has at most `max_blocks` blocks.
    """
    start = 0
    for end in range(1, len(places) + 1):
        num = end - start
        if end < len(places) and places[end] == places[start] + num and num < max_blocks and places[end] % slab_blocks:
            continue
        yield _Run(start, places[start], num)
        start = end
