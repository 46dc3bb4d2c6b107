"""A GPU used through torch: its errors, and its streams, events, pinned memory and graphs.

The classes implement the interfaces of `worker_service/streams.py`.
"""

from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from worker_service.streams import Stream, StreamWork

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the operation was not started, and the device still works
# Texts of libraries that report it only as text: torch's CPU allocator, a cuBLAS handle, a kernel that Triton loads.
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "[CUDA]: out of memory")


class CudaStream:
    """A CUDA stream: a queue of GPU operations that run in order. It implements the interface `Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, operation: StreamWork) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self) -> torch.cuda.Event:
        # a thread that waits for the event sleeps, and leaves its core to other threads
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)


class CudaDevice:
    """A CUDA GPU with its streams. It implements the interface `Device`.

    All CUDA graphs share one memory pool, because only one graph runs at a time.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._compute = CudaStream(torch_device)
        self.compute: Stream = self._compute
        self.results: Stream = CudaStream(torch_device)
        self.moves: Stream = CudaStream(torch_device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # graphs that can still be replayed
        self._graph_pool: Any = None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, operation: StreamWork) -> StreamWork:
        # The operation first runs without capture. That run compiles kernels, and lets libraries allocate memory, which
        # they may not do during a capture.
        self.compute.run(operation)
        self.synchronize()
        if not self._graphs:  # the allocator does not let a graph reuse the pool of the last dropped graph
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and the resolver, may use the device during the capture. Their
        # operations are not captured.
        stream = self._compute.stream
        with torch.cuda.graph(graph, self._graph_pool, stream, capture_error_mode="thread_local"):
            operation()
        self._graphs.add(graph)
        return partial(self.compute.run, graph.replay)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether `error` reports a failed memory allocation on the GPU or the host.

    After such an error the device still works, so a smaller part of the same work could succeed.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def is_fatal(error: Exception) -> bool:
    """Return whether `error` is a permanent error of the GPU.

    After such an error every later CUDA call fails too, until a new process starts.
    """
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
