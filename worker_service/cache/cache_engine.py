"""The KV cache's memory: allocation of the pools, and copies and moves of blocks.

This module does not know which sequence owns a block. Each pool is one block-major allocation: K and V of all layers of
a block are contiguous, so a move of a block moves one contiguous piece. Blocks that are adjacent at both ends move as
one piece too. Each layer sees its part of the device pool as two views with the block index outermost. Layers of
different groups (see `pagewire/network/layer_groups.py`) see the same bytes. Block tables ensure that they never use
the same block at the same time. Plans never name block 0 of either pool: on the device, block 0 is padding and stays
zero.

A model with states (see `pagewire.kernels.states`) has two more pools, of states. Their moves are among the moves of
blocks in a plan, with ids from FIRST_STATE_ID on. Copies name blocks only.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pagewire.common.wire.messages import FIRST_STATE_ID, StepPlan, WorkerProtocolError
from pagewire.kernels.cache_rows import row_size
from worker_service.attention import LayerCache
from worker_service.cache.host_moves import HostMoves
from worker_service.cache.stream_moves import StreamMoves
from worker_service.streams import Device

_MEASURED_BYTES = 32 << 20  # upper bound of one move of the bandwidth measurement
_NUM_MEASUREMENTS = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The dimensions and the data type of one KV cache block."""

    heads: tuple[tuple[int, int], ...]  # [num_layers] the number of KV heads and the head size of each layer
    block_size: int
    dtype: torch.dtype
    is_head_major: bool = False  # a block stores each KV head's positions together, rather than each position's heads
    # The layers of each layer group, in the order in which a block stores them; empty: all layers are in one group.
    layer_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each layer group."""
        return self.layer_groups or (tuple(range(len(self.heads))),)

    @property
    def block_elements(self) -> int:
        """The number of elements in one KV cache block: the keys and values of the largest layer group."""
        return max(sum(map(self.layer_elements, layers)) for layers in self.groups)

    @property
    def block_bytes(self) -> int:
        """The size of one KV cache block in bytes."""
        return self.block_elements * self.dtype.itemsize

    def layer_elements(self, layer: int) -> int:
        """Return the number of elements of a block that store the keys and values of a layer."""
        num_kv_heads, head_dim = self.heads[layer]
        return 2 * self.block_size * num_kv_heads * row_size(head_dim, self.dtype)

    def views(self, storage: torch.Tensor) -> list[LayerCache]:
        """Return the key cache and the value cache of each layer in `storage`, [num_blocks, block_elements].

        Each is [num_blocks, block_size, num_kv_heads, row_size], whatever the memory layout of a block. In an int8
        cache, a row includes the scale.
        """
        caches: dict[int, LayerCache] = {}
        for layers in self.groups:
            start = 0
            for layer in layers:
                num_kv_heads, head_dim = self.heads[layer]
                end = start + self.layer_elements(layer)
                order = (num_kv_heads, self.block_size) if self.is_head_major else (self.block_size, num_kv_heads)
                content = storage[:, start:end].unflatten(1, (2, *order, row_size(head_dim, self.dtype)))
                content = content.transpose(2, 3) if self.is_head_major else content
                caches[layer] = (content[:, 0], content[:, 1])
                start = end
        return [caches[layer] for layer in range(len(self.heads))]


class CacheEngine:
    """The memory of the KV cache: a pool of blocks on the device, and a pool of swapped-out blocks on the host.

    `layers[i]` is (key_cache, value_cache), each [num_blocks + 1, block_size, num_kv_heads, row_size]. `states` is
    [num_states + 1, state_size] float32. The engine initializes only block 0 and state 0. Other blocks and states may
    contain anything, NaN included, because their content is not read before a step or a move writes it. `check`
    validates the moves and copies of a plan before any of them starts.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_device_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
        streams: Device | None = None,
        *,
        state_size: int = 0,
        num_device_states: int = 0,
        num_host_states: int = 0,
    ) -> None:
        """Allocate the device blocks and the host blocks, and the states.

        `streams` is the accelerator that moves blocks while it computes. If it is None, all operations run in the order
        of the calls. On a CPU they finish before the calls return.
        """
        self.shape = shape
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.storage = torch.empty((num_device_blocks + 1, shape.block_elements), dtype=shape.dtype, device=device)
        self.layers = shape.views(self.storage)
        blocks = self.storage.view(torch.uint8)  # [num_device_blocks + 1, block_bytes]
        blocks[0] = 0
        self._moves = _moves_of(blocks, num_host_blocks, streams)
        self.num_device_states = num_device_states
        self.num_host_states = num_host_states
        # On an accelerator, each state begins at a multiple of 16 bytes, which its moves need.
        width = state_size if streams is None else state_size + -state_size % 4
        states = torch.empty((num_device_states + 1, width), device=device)
        states[0] = 0
        self.states = states[:, :state_size]
        self._state_moves = _moves_of(states.view(torch.uint8), num_host_states, streams if state_size else None)
        self._last_planned_step = 0

    def reset(self) -> None:
        """Wait until all moves and copies have finished, and prepare for a new session with a scheduler."""
        self._moves.synchronize()
        self._moves.reset()
        self._state_moves.reset()
        self._last_planned_step = 0

    def check(self, plan: StepPlan) -> None:
        """Raise WorkerProtocolError if a step plan contains an invalid move or copy of KV cache blocks or states.

        A move or copy is invalid if an id is out of range, if the lists of sources and targets differ in length, if it
        moves a block to a state, or if a block or state is written twice. A plan must not swap the same block out and
        in.
        """
        blocks, states = _divide(plan)
        _check_plan(blocks, "block", self.num_device_blocks, self.num_host_blocks)
        if states is not None:
            _check_plan(states, "state", self.num_device_states, self.num_host_states)

    def move(self, plan: StepPlan) -> None:
        """Start the plan's moves of KV cache blocks and states between device and host.

        The moves run after all computation that was submitted earlier. `plan` must have passed `check`.
        """
        self._last_planned_step = plan.step
        if plan.swap_out_device_blocks or plan.swap_in_host_blocks:
            blocks, states = _divide(plan)
            self._moves.start(blocks)
            if states is not None:
                self._state_moves.start(states)

    def copy(self, plan: StepPlan) -> None:
        """Copy KV cache blocks within the device as the plan requests, before any later computation.

        `plan` must have passed `check`.
        """
        if plan.copy_source_blocks:
            self._moves.copy(plan.copy_source_blocks, plan.copy_target_blocks)

    def fill_with_nan(self, block_tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        """Fill positions [start, end) of a sequence in the KV cache with NaN, because they could not be computed.

        A sequence that reads these positions then yields no token. `block_tables` has the sequence's block table of
        each layer group.
        """
        block_size, position = self.shape.block_size, start
        # In an int8 cache all bits are set, in the scale too, which makes the scale NaN.
        value = float("nan") if self.shape.dtype.is_floating_point else -1
        while position < end:
            index = position // block_size
            last = min(end, (index + 1) * block_size)
            places = slice(position - index * block_size, last - index * block_size)
            for layers, table in zip(self.shape.groups, block_tables, strict=True):
                for cache in (cache for layer in layers for cache in self.layers[layer]):
                    self._moves.run(partial(cache[int(table[index]), places].fill_, value))
            position = last

    def fill_states_with_nan(self, states: Sequence[int]) -> None:
        """Fill states with NaN, because they could not be computed. A sequence that reads them yields no token."""
        for state in states:
            self._state_moves.run(partial(self.states[state].fill_, float("nan")))

    def last_moved_step(self) -> int:
        """Return the number of the last step whose moves between device and host have finished.

        The moves of all earlier steps have finished too. Without streams, moves finish before `move` returns.
        """
        return min(moves.last_done_step(self._last_planned_step) for moves in (self._moves, self._state_moves))

    @property
    def is_moving(self) -> bool:
        """Whether any move of KV cache blocks or states between device and host is unfinished.

        The value stays True until `last_moved_step` has reported that the moves have finished.
        """
        return self._moves.is_busy or self._state_moves.is_busy

    def measure_bandwidth(self) -> float:
        """Measure how fast KV cache blocks move between device and host. Return bytes per second.

        The result is the median of a few moves of scattered blocks in both directions. The measurement overwrites the
        content of the blocks. The result is zero if there are no host blocks.
        """
        if not self.num_host_blocks:
            return 0.0
        max_blocks = max(1, _MEASURED_BYTES // self.shape.block_bytes)
        device_ids = tuple(range(1, min(self.num_device_blocks, self.num_host_blocks, max_blocks) + 1))
        host_ids = device_ids[::-1]  # no two blocks form one piece, as in pools that have been in use
        out = StepPlan(0, 0, swap_out_device_blocks=device_ids, swap_out_host_blocks=host_ids)
        back = StepPlan(0, 0, swap_in_host_blocks=host_ids, swap_in_device_blocks=device_ids)
        self._time(out)  # the first move touches the memory for the first time
        seconds = [self._time(plan) for plan in (out, back) * _NUM_MEASUREMENTS]
        self.reset()
        return len(device_ids) * self.shape.block_bytes / statistics.median(seconds)

    def _time(self, plan: StepPlan) -> float:
        """Carry out the block moves of a plan and return their duration in seconds."""
        started = time.perf_counter()
        self.move(plan)
        self._moves.synchronize()
        return time.perf_counter() - started


def _moves_of(pool: torch.Tensor, num_on_host: int, streams: Device | None) -> HostMoves | StreamMoves:
    """Allocate the host pool for a pool of blocks or states, [num + 1, block_bytes] uint8. Return the moves."""
    return HostMoves(pool, num_on_host) if streams is None else StreamMoves(streams, pool, num_on_host)


def _divide(plan: StepPlan) -> tuple[StepPlan, StepPlan | None]:
    """Divide a plan into one with its moves and copies of blocks, and one with its moves of states, numbered from 1.

    The second is None if no state is moved. Raises WorkerProtocolError if a block is moved to a state, or if the lists
    of sources and targets differ in length.
    """
    if max((*plan.swap_out_device_blocks, *plan.swap_in_host_blocks), default=0) < FIRST_STATE_ID:
        return plan, None
    blocks: dict[str, Any] = {}
    states: dict[str, Any] = {"copy_source_blocks": (), "copy_target_blocks": ()}
    for source, target in (
        ("swap_out_device_blocks", "swap_out_host_blocks"),
        ("swap_in_host_blocks", "swap_in_device_blocks"),
    ):
        read, written = getattr(plan, source), getattr(plan, target)
        _check_lengths(source, read, written)
        if any((one < FIRST_STATE_ID) != (other < FIRST_STATE_ID) for one, other in zip(read, written, strict=True)):
            raise WorkerProtocolError(f"{source} and {target} move a block to a state, or a state to a block")
        for name, ids in ((source, read), (target, written)):
            blocks[name] = tuple(each for each in ids if each < FIRST_STATE_ID)
            states[name] = tuple(each - FIRST_STATE_ID for each in ids if each >= FIRST_STATE_ID)
    return replace(plan, **blocks), replace(plan, **states)


def _check_plan(plan: StepPlan, kind: str, num_on_device: int, num_on_host: int) -> None:
    """Check the moves and copies of one kind of a plan: "block" or "state". See `CacheEngine.check`."""
    for name, sources, num_sources, targets, num_targets in (
        ("swap_out", plan.swap_out_device_blocks, num_on_device, plan.swap_out_host_blocks, num_on_host),
        ("swap_in", plan.swap_in_host_blocks, num_on_host, plan.swap_in_device_blocks, num_on_device),
        ("copy", plan.copy_source_blocks, num_on_device, plan.copy_target_blocks, num_on_device),
    ):
        if not sources and not targets:
            continue
        _check_lengths(name, sources, targets)
        _check_ids(f"{name} reads", kind, sources, num_sources)
        _check_ids(f"{name} writes", kind, targets, num_targets)
        if len(set(targets)) != len(targets):
            raise WorkerProtocolError(f"{name} writes a {kind} twice")
    _check_moved_once(f"device {kind}", plan.swap_out_device_blocks, plan.swap_in_device_blocks)
    _check_moved_once(f"host {kind}", plan.swap_out_host_blocks, plan.swap_in_host_blocks)


def _check_lengths(name: str, sources: Sequence[int], targets: Sequence[int]) -> None:
    if len(sources) != len(targets):
        raise WorkerProtocolError(f"{name} names {len(sources)} blocks to read and {len(targets)} to write")


def _check_ids(what: str, kind: str, ids: Sequence[int], num: int) -> None:
    if min(ids) < 1 or max(ids) > num:
        known = f"ids are 1 to {num}" if num else f"this pool has no {kind}s"
        raise WorkerProtocolError(f"{what} {kind}s {min(ids)} to {max(ids)}; {known}")


def _check_moved_once(what: str, swapped_out: Sequence[int], swapped_in: Sequence[int]) -> None:
    """Raise WorkerProtocolError if the same plan swaps a KV cache block or a state out and in.

    Until a move has finished, no other move may write its source or read its target.
    """
    both = swapped_out and swapped_in and set(swapped_out).intersection(swapped_in)
    if both:
        raise WorkerProtocolError(f"{what} {min(both)} is swapped out and in by one plan")
