"""The interface between a computation and its device: streams, events, pinned memory and graphs.

An operation is a callable that reads and writes tensors and never waits for the device. A stream runs its operations in
order, at any time after they were put on the stream. Only `wait_for` orders the operations of different streams. Host
memory that an operation reads or writes therefore belongs to the operation until a later event on its stream is done.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

StreamWork = Callable[[], object]


class Stream(Protocol):
    """A queue of operations on a device, such as a CUDA stream.

    Operations run in the order in which they were added.
    """

    def run(self, operation: StreamWork) -> None:
        """Add an operation to the end of the stream. The call does not wait for the operation."""

    def record(self) -> torch.cuda.Event:
        """Return an event that is done when all operations added to the stream so far are done.

        Any thread may wait for the event.
        """

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Make all operations that are added to this stream later wait for the event."""


class Device(Protocol):
    """One accelerator, such as a GPU, with its streams. Only one thread may use it.

    Other threads may use only events and `synchronize`.
    """

    torch_device: torch.device
    compute: Stream
    results: Stream  # copies to the host what steps produced
    moves: Stream  # copies blocks between device and host

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate page-locked (pinned) host memory, which streams can copy asynchronously.

        Its content is undefined.
        """

    def capture(self, operation: StreamWork) -> StreamWork:
        """Run an operation on the compute stream once, then capture it as a CUDA graph. Return a replay function.

        The replay function adds the graph to the compute stream. A replay reads and writes the same tensors as the
        captured operation. The graph exists as long as the replay function.
        """

    def synchronize(self) -> None:
        """Wait until all operations on all streams of the device are done."""
