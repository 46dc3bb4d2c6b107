"""A GPU by torch: its errors, and streams, events, pinned memory and graphs as `worker_service/streams.py` has them."""

from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from worker_service.streams import Stream, StreamWork

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: nothing was done, and the device goes on
# Where a library says it in words only: torch's allocator on a CPU, a cuBLAS handle, a kernel that Triton loads.
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "[CUDA]: out of memory")


class CudaStream:
    """See `Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, operation: StreamWork) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # what waits for it sleeps, and leaves the core to others
        event.record(self.stream)
        return event

    def wait_for(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)


class CudaDevice:
    """See `Device`. All of its graphs share one pool of memory: only one runs at a time."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._compute = CudaStream(torch_device)
        self.compute: Stream = self._compute
        self.results: Stream = CudaStream(torch_device)
        self.moves: Stream = CudaStream(torch_device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # that may be replayed
        self._graph_pool: Any = None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, operation: StreamWork) -> StreamWork:
        # Carried out once as it is: kernels are compiled and libraries allocate what a capture may not.
        self.compute.run(operation)
        self.synchronize()
        if not self._graphs:  # the allocator lets no graph share what the last one has left
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the device meanwhile, as NCCL's watchdog and the resolver do, is no part of it.
        stream = self._compute.stream
        with torch.cuda.graph(graph, self._graph_pool, stream, capture_error_mode="thread_local"):
            operation()
        self._graphs.add(graph)
        return partial(self.compute.run, graph.replay)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the same could be computed with more memory, and less of it with what there is."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def is_fatal(error: Exception) -> bool:
    """An error of the device stays: every later call fails too, until a new process begins."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
