"""Moves of blocks between a device and its host, beside what the device computes.

Blocks are scattered at both ends, and a bus is only quick with long pieces. So a kernel gathers a chunk of blocks into
a dense staging buffer of the device at the speed of its memory, and a transfer takes them to the host; the other way
round, a transfer and a scatter. (A kernel that wrote to the host by itself would hold on to the device's processors for
as long as the bus takes, and slow what is computed.)

At the host's end nothing gathers. Instead, a host block's id does not say where it lies: the pool has as many places as
ids, and a swap-out, whose targets lose what they held, deals their places out anew, in ascending order. An id that was
not named before takes the next place that was not given yet. Blocks that leave together thus lie side by side wherever
the places that came free do, and come back in one piece. At worst, when nothing lies beside anything, each block is a
transfer, as it would be without the map.

The pool is made of slabs of a power of two of bytes, since torch rounds every piece of pinned memory up to one.

A transfer takes `_MAX_TRANSFER_BYTES` at most: what steps themselves send to and from the device, a few KB, goes
through the same copy engines and waits for the one under way.
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
    """Blocks of the staging buffer that a device needs beside its pool; none if nothing can be moved."""
    return min(num_host_blocks, max(1, _MAX_STAGING_BYTES // block_bytes))


@dataclass(frozen=True, slots=True)
class _BlockOperations:
    """Blocks are rows of bytes, [num_blocks, block_bytes] uint8; ids are int64 on their device."""

    gather: Callable[[Tensor, Tensor, Tensor], None]  # (blocks, ids, staging): staging[i] = blocks[ids[i]]
    scatter: Callable[[Tensor, Tensor, Tensor], None]  # (staging, blocks, ids): blocks[ids[i]] = staging[i]
    # (blocks, source_ids, target_ids): blocks[target_ids[i]] = blocks[source_ids[i]]; no id on both sides.
    copy: Callable[[Tensor, Tensor, Tensor], None]


def _block_operations(device: torch.device) -> _BlockOperations:
    """Triton's kernels on CUDA, where a gather is one launch without memory of its own; plain torch elsewhere."""
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
    """Sends ids to the device. Each lot has host memory of its own until a stream has read it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def put(self, ids: Sequence[int]) -> Tensor:
        """The ids in pinned memory, for an operation to copy to the device; `hold` them once it is on its stream."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        pinned = self._device.pinned((len(ids),), torch.int64)
        pinned.copy_(torch.tensor(ids, dtype=torch.int64))
        return pinned

    def hold(self, pinned: Tensor, stream: Stream) -> torch.cuda.Event:
        """Keep the memory until all that is on the stream now has been done."""
        event = stream.record()
        self._under_way.append((event, pinned))
        return event

    def reset(self) -> None:
        """Every stream has come to its end."""
        self._under_way.clear()


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks side by side: staging[first : first + num] and place, place + 1, ... of one slab of the host's pool."""

    first: int
    place: int
    num: int


class StreamMoves:
    """A host pool, and moves to and from it on the device's stream for moves; copies between the device's own blocks.

    The moves of a plan begin after everything that was put on the compute stream before, and nothing waits for them.
    While a move is not done, no plan may write a block that it names, or read the one that it writes (S3 and S4 of
    ARCHITECTURE.md).
    """

    def __init__(self, device: Device, blocks: Tensor, num_host_blocks: int) -> None:
        """`blocks`: the device's pool, [num_blocks + 1, block_bytes] uint8."""
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
        self._places: dict[int, int] = {}  # of the host blocks that were named; the first places of the pool
        self._max_transfer_blocks = max(1, _MAX_TRANSFER_BYTES // block_bytes)
        self._ids = _BlockIds(device)
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()  # step, when its moves are done

    def start(self, plan: StepPlan) -> None:
        """Put the plan's moves on their stream. No block is named by moves of both directions."""
        stream = self._device.moves
        stream.wait_for(self._device.compute.record())
        out_places = self._deal_out(plan.swap_out_host_blocks)
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
        """Copy between device blocks before anything else is computed. All are read before one is written."""
        ids = self._ids.put([*sources, *targets])
        self._device.compute.run(partial(self._copy, ids, not set(sources).isdisjoint(targets)))
        self._ids.hold(ids, self._device.compute)

    def run(self, operation: Callable[[], object]) -> None:
        """Carry out what writes to the blocks, before anything else is computed."""
        self._device.compute.run(operation)

    def synchronize(self) -> None:
        """Return when every stream has come to its end."""
        self._device.synchronize()

    def last_done_step(self, last_planned_step: int) -> int:
        """The moves of all plans up to this step are done."""
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        return self._pending[0][0] - 1 if self._pending else last_planned_step

    @property
    def is_busy(self) -> bool:
        """Whether moves have been started that `last_done_step` has not yet told of."""
        return bool(self._pending)

    def reset(self) -> None:
        """Every stream has come to its end, and no block holds anything that is read again."""
        self._pending.clear()
        self._ids.reset()
        self._places.clear()

    def _host(self, place: int, num: int) -> Tensor:
        """Places of one slab: [num, block_bytes]."""
        slab, first = divmod(place, self._slab_blocks)
        return self._slabs[slab][first : first + num]

    def _place(self, host_block: int) -> int:
        return self._places.setdefault(host_block, len(self._places))

    def _deal_out(self, host_blocks: Sequence[int]) -> list[int]:
        """The places of these blocks in ascending order, which they now have in the order of the blocks."""
        places = sorted([self._place(host_block) for host_block in host_blocks])
        for host_block, place in zip(host_blocks, places, strict=True):
            self._places[host_block] = place
        return places

    def _runs(self, places: Sequence[int]) -> list[_Run]:
        return list(_find_runs(places, self._max_transfer_blocks, self._slab_blocks))

    def _copy(self, ids: Tensor, is_chained: bool) -> None:
        """`ids`: those to read and then those to write. Chained: a block is both."""
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
            self._host(run.place, run.num).copy_(staged, non_blocking=True)

    def _swap_in(self, ids: Tensor, runs: list[_Run]) -> None:
        staging = self._staging[: len(ids)]
        for run in runs:
            staged = staging[run.first : run.first + run.num]
            staged.copy_(self._host(run.place, run.num), non_blocking=True)
        self._operations.scatter(staging, self._blocks, ids.to(self._blocks.device, non_blocking=True))


def _find_runs(places: Sequence[int], max_blocks: int, slab_blocks: int) -> Iterator[_Run]:
    """Pieces of places that ascend by 1, in order, each in one slab and none longer than `max_blocks`."""
    start = 0
    for end in range(1, len(places) + 1):
        num = end - start
        if end < len(places) and places[end] == places[start] + num and num < max_blocks and places[end] % slab_blocks:
            continue
        yield _Run(start, places[start], num)
        start = end
