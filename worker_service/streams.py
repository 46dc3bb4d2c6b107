"""The interface between a computation and its device: streams, events, pinned memory and graphs.

An operation is a callable that reads and writes tensors and never asks the device to wait. A stream carries its
operations out one behind the other, at any time after they were put on it; streams know nothing of one another but what
`wait_for` orders. So host memory that an operation reads or writes is the operation's until an event behind it is done.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

StreamWork = Callable[[], object]


class Stream(Protocol):
    """A queue of operations on a device. They are carried out in the order in which they were put on it."""

    def run(self, operation: StreamWork) -> None:
        """Put an operation on the stream."""

    def record(self) -> torch.cuda.Event:
        """The place behind all that was put on the stream so far. Any thread may wait for it."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Whatever is put on this stream from now on is carried out after the event is done."""


class Device(Protocol):
    """One accelerator, used by one thread; only events and `synchronize` may be used by another."""

    torch_device: torch.device
    compute: Stream
    results: Stream  # copies to the host what steps produced
    moves: Stream  # copies blocks between device and host

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that streams copy from and to by themselves. Its content is anything."""

    def capture(self, operation: StreamWork) -> StreamWork:
        """Carry an operation out on the compute stream as it would be, and keep it as a graph, for as long as there is
        what is returned.

        That puts it on the compute stream again, where it reads and writes the tensors that it did when it was
        captured.
        """

    def synchronize(self) -> None:
        """Return when every stream has carried out everything."""
