"""A device that executes its streams in random legal orders, so that a missing wait shows as a wrong result.

An operation is not executed when it is put on a stream, except by chance. A waiting host makes the streams execute
until the awaited event has happened. Each stream is in order, and operations of different streams are in any order that
`wait_for` permits. So an operation may run long after the host has continued, and a copy that the host does not wait
for has not happened yet.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pagewire.kernels import sampling
from worker_service.streams import StreamWork

CPU = torch.device("cpu")


class Guard(Enum):
    """A guard that keeps an operation from running too early, or memory from being used too early."""

    RESULTS_AFTER_COMPUTE = "the results stream waits for compute"
    MOVES_AFTER_COMPUTE = "the moves stream waits for compute"
    HOST_AFTER_COMPUTE = "the host waits for compute"
    HOST_AFTER_RESULTS = "the host waits for results"


class FakeEvent:
    def __init__(self, device: "FakeDevice", host_guard: Guard | None) -> None:
        self._device = device
        self._host_guard = host_guard
        self.has_happened = False

    def query(self) -> bool:
        with self._device.lock:
            self._device.carry_out_some()
            return self.has_happened

    def synchronize(self) -> None:
        if self._host_guard is None or self._host_guard is not self._device.dropped:
            with self._device.lock:
                self._device.carry_out_until(self)


@dataclass(frozen=True)
class _Wait:
    event: FakeEvent


class FakeStream:
    def __init__(self, device: "FakeDevice", guard: Guard | None = None, host_guard: Guard | None = None) -> None:
        self._device = device
        self._guard = guard  # its waits for other streams
        self._host_guard = host_guard  # the host's waits for this stream
        self.pending: deque[StreamWork | FakeEvent | _Wait] = deque()

    def run(self, operation: StreamWork) -> None:
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
            with _recorded() as recorder:
                head()
            self._device.launches += recorder.num_launches()

    def _put(self, item: StreamWork | FakeEvent | _Wait) -> None:
        with self._device.lock:
            self.pending.append(item)
            self._device.carry_out_some()


class _Recorder(TorchDispatchMode):
    """A recorder that executes every launch and records the function, its arguments and the tensors that it created.

    Operations that would make the host wait for the device are refused.
    """

    current: "_Recorder | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], list[Tensor]]] = []
        self.is_in_kernel = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert not _waits_for_host(function, args), f"the host would wait for {function}"
        if function._can_decompose():
            with self:
                return function.decompose(*args, **kwargs)
        made = function(*args, **kwargs)
        self.launches.append((function, args, kwargs, _tensors(made)))
        return made

    def launch(self, kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.is_in_kernel:
            return kernel(*args, **kwargs)
        self.is_in_kernel = True
        try:
            with _disable_current_modes():  # operations within a kernel are not recorded
                made = kernel(*args, **kwargs)
        finally:
            self.is_in_kernel = False
        self.launches.append((as_kernel(kernel), args, kwargs, _tensors(made)))
        return made

    def num_launches(self) -> Counter[str]:
        """Return the number of launches that a GPU would get, by name. See `FakeDevice.launches`."""
        return Counter(_name(function) for function, _, _, _ in self.launches if _is_launch(function))


@contextmanager
def _recorded() -> Iterator[_Recorder]:
    assert _Recorder.current is None
    recorder = _Recorder()

    def host_knows(tensor: Tensor) -> bool:
        return recorder.is_in_kernel

    with recorder, mock.patch.object(sampling, "_host_knows", host_knows):
        _Recorder.current = recorder
        try:
            yield recorder
        finally:
            _Recorder.current = None


_ALLOCATIONS = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


def _is_launch(function: Callable[..., Any]) -> bool:
    """Return whether a GPU would have work to do. Views, and allocations that are not written to, are no work."""
    if not isinstance(function, OpOverload):
        return True
    return not (function.is_view or function.overloadpacket in (*_ALLOCATIONS, torch.ops.aten._unsafe_view))


def _name(function: Callable[..., Any]) -> str:
    return str(function.overloadpacket) if isinstance(function, OpOverload) else function.__name__


_WAITS_FOR_HOST = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.lift_fresh.default,  # a tensor of Python numbers
)
_INDEXES = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _waits_for_host(function: Any, args: Sequence[Any]) -> bool:
    """Return whether the function copies from the host, or makes the host wait for results of the device."""
    is_masked = function in _INDEXES and any(index is not None and index.dtype == torch.bool for index in args[1])
    return function in _WAITS_FOR_HOST or is_masked


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts as one launch and may read results of the device.

    The function reads its tensors at the time of its execution.
    """

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        recorder = _Recorder.current
        return function(*args, **kwargs) if recorder is None else recorder.launch(function, args, kwargs)

    return launch


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    if is_dataclass(made):
        return _tensors([getattr(made, entry.name) for entry in fields(made)])
    return [tensor for part in made for tensor in _tensors(part)] if isinstance(made, list | tuple) else []


class FakeGraph:
    """A graph that repeats the launches of its capture, with the same tensors.

    All other values are as they were during the capture, as in a GPU's graph.
    """

    def __init__(self, device: "FakeDevice", operation: StreamWork) -> None:
        self._device = device
        self.num_replays = 0
        with _recorded() as recorder:
            operation()
        self._launches = recorder.launches
        self.launches = recorder.num_launches()

    def replay(self) -> None:
        self.num_replays += 1
        self._device.compute.run(as_kernel(self.replay_launches))

    @torch.inference_mode()
    def replay_launches(self) -> None:
        for function, args, kwargs, made in self._launches:
            for tensor, again in zip(made, _tensors(function(*args, **kwargs)), strict=True):
                if tensor.data_ptr() != again.data_ptr():
                    tensor.copy_(again)


class FakeDevice:
    """A fake `Device`, whose memory is the host's.

    Attributes:
        launches: the executed launches on any stream, by name: kernels, torch operations, copies and graph replays. A
            torch operation counts as one launch, even a matrix multiplication that a library would execute as several.
            Views, and memory that is not written to, do not count. `FakeGraph.launches` are the launches in a graph.
    """

    torch_device = CPU

    def __init__(self, seed: int, eagerness: float = 0.3, dropped: Guard | None = None) -> None:
        """`eagerness`: the probability of executing an operation that is not waited for, at each occasion.

        `dropped`: a guard that is left out, so that tests can show that it is needed.
        """
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
        self.launches: Counter[str] = Counter()

    @property
    def _streams(self) -> tuple[FakeStream, ...]:
        return (self.compute, self.results, self.moves)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory filled with random bytes."""
        num_bytes = torch.empty((), dtype=dtype).element_size()
        for size in shape:
            num_bytes *= size
        garbage = torch.frombuffer(bytearray(self._rng.randbytes(num_bytes) or b"\0"), dtype=torch.uint8)
        return garbage[:num_bytes].view(dtype).view(shape)

    def capture(self, operation: StreamWork) -> StreamWork:
        with self.lock:
            self.compute.run(operation)
            self.synchronize()
            self.graphs.append(FakeGraph(self, operation))
            return self.graphs[-1].replay

    def synchronize(self) -> None:
        with self.lock:
            while any(stream.pending for stream in self._streams):
                self._carry_out_one()

    def carry_out_some(self) -> None:
        """Execute a random number of operations."""
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
