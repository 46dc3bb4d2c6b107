"""A device that carries streams out in random legal orders, so that whatever nobody waits for shows as a wrong result.

Nothing is carried out when it is put on a stream, unless chance says so. Who waits has the streams carried out, each in
its own order and they among one another in any order that `wait_for` allows, until what is waited for is done. So an
operation may run long after the host has gone on, and a copy that the host does not wait for has not happened yet.
"""

import random
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from worker_service.device import Operation

CPU = torch.device("cpu")


class Guard(Enum):
    """What keeps an operation from running too early, or memory from being used too early."""

    RESULTS_AFTER_COMPUTE = "the results stream waits for compute"
    MOVES_AFTER_COMPUTE = "the moves stream waits for compute"
    HOST_AFTER_COMPUTE = "the host waits for compute"
    HOST_AFTER_RESULTS = "the host waits for results"


class FakeEvent:
    def __init__(self, device: "FakeDevice", host_guard: Guard | None) -> None:
        self._device = device
        self._host_guard = host_guard
        self.has_happened = False

    def is_done(self) -> bool:
        with self._device.lock:
            self._device.carry_out_some()
            return self.has_happened

    def wait(self) -> None:
        if self._host_guard is None or self._host_guard is not self._device.dropped:
            with self._device.lock:
                self._device.carry_out_until(self)


@dataclass(frozen=True)
class _Wait:
    event: FakeEvent


class FakeStream:
    def __init__(self, device: "FakeDevice", guard: Guard | None = None, host_guard: Guard | None = None) -> None:
        self._device = device
        self._guard = guard  # its waiting for other streams
        self._host_guard = host_guard  # the host's waiting for it
        self.pending: deque[Operation | FakeEvent | _Wait] = deque()

    def run(self, operation: Operation) -> None:
        self._put(operation)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device, self._host_guard)
        self._put(event)
        return event

    def wait_for(self, event: FakeEvent) -> None:
        if self._guard is None or self._guard is not self._device.dropped:
            self._put(_Wait(event))

    @property
    def can_go_on(self) -> bool:
        head = self.pending[0] if self.pending else None
        return head is not None and not (isinstance(head, _Wait) and not head.event.has_happened)

    def go_on(self) -> None:
        head = self.pending.popleft()
        if isinstance(head, FakeEvent):
            head.has_happened = True
        elif not isinstance(head, _Wait):
            head()

    def _put(self, item: Operation | FakeEvent | _Wait) -> None:
        with self._device.lock:
            self.pending.append(item)
            self._device.carry_out_some()


class FakeGraph:
    def __init__(self, device: "FakeDevice", operation: Operation) -> None:
        self._device = device
        self._operation = operation
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._device.compute.run(self._operation)


class FakeDevice:
    """See `Device`. Its memory is the host's."""

    torch_device = CPU

    def __init__(self, seed: int, eagerness: float = 0.3, dropped: Guard | None = None) -> None:
        """`eagerness`: how likely something is carried out that nobody waits for, whenever there is an occasion.
        `dropped`: a guard that is not there, so that tests can see that it is needed."""
        print("fake device: seed", seed)
        self.lock = threading.RLock()
        self.dropped = dropped
        self._rng = random.Random(seed)
        self._eagerness = eagerness
        self._is_carrying_out = False
        self.compute = FakeStream(self, host_guard=Guard.HOST_AFTER_COMPUTE)
        self.results = FakeStream(self, Guard.RESULTS_AFTER_COMPUTE, Guard.HOST_AFTER_RESULTS)
        self.moves = FakeStream(self, Guard.MOVES_AFTER_COMPUTE)
        self.graphs: list[FakeGraph] = []

    @property
    def _streams(self) -> tuple[FakeStream, ...]:
        return (self.compute, self.results, self.moves)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Filled with garbage."""
        num_bytes = torch.empty((), dtype=dtype).element_size()
        for size in shape:
            num_bytes *= size
        garbage = torch.frombuffer(bytearray(self._rng.randbytes(num_bytes) or b"\0"), dtype=torch.uint8)
        return garbage[:num_bytes].view(dtype).view(shape)

    def capture(self, operation: Operation) -> FakeGraph:
        with self.lock:
            self.compute.run(operation)
            self.synchronize()
            self.graphs.append(FakeGraph(self, operation))
            return self.graphs[-1]

    def synchronize(self) -> None:
        with self.lock:
            while any(stream.pending for stream in self._streams):
                self._carry_out_one()

    def carry_out_some(self) -> None:
        """As chance will have it."""
        while not self._is_carrying_out and self._rng.random() < self._eagerness and self._able():
            self._carry_out_one()

    def carry_out_until(self, event: FakeEvent) -> None:
        while not event.has_happened:
            self._carry_out_one()

    def _able(self) -> list[FakeStream]:
        return [stream for stream in self._streams if stream.can_go_on]

    def _carry_out_one(self) -> None:
        able = self._able()
        assert able, "the streams wait for one another"
        self._is_carrying_out = True
        try:
            self._rng.choice(able).go_on()
        finally:
            self._is_carrying_out = False
