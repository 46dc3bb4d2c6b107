"""Streams, events, pinned memory and graphs of a GPU, by torch. `worker_service/streams.py` says what they mean."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from worker_service.streams import DeviceEvent, Stream, StreamWork


class CudaEvent:
    """See `DeviceEvent`. Who waits sleeps, and leaves the core to others."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    """See `Stream`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, operation: StreamWork) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return CudaEvent(event)

    def wait_for(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaGraph:
    """See `Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, compute: Stream) -> None:
        self._graph = graph
        self._compute = compute

    def replay(self) -> None:
        self._compute.run(self._graph.replay)


class CudaDevice:
    """See `Device`. All of its graphs share one pool of memory: only one runs at a time."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._compute = CudaStream(torch_device)
        self.compute: Stream = self._compute
        self.results: Stream = CudaStream(torch_device)
        self.moves: Stream = CudaStream(torch_device)
        self._graphs: WeakSet[CudaGraph] = WeakSet()  # that may be replayed
        self._graph_pool: Any = None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, operation: StreamWork) -> CudaGraph:
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
        captured = CudaGraph(graph, self.compute)
        self._graphs.add(captured)
        return captured

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
