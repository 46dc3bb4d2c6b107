"""The memory pools that CUDA graphs share, as requested from torch. The graphs themselves are fakes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tests.worker.fake_device import CPU
from worker_service.device.cuda import CudaDevice


class Graph:
    """A fake of torch's graph."""

    def replay(self) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the pools that captures were given, in order."""
    given: list[int] = []
    handles = iter(range(100))

    @contextmanager
    def graph(captured: Graph, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        given.append(pool)
        yield

    stand_ins = {
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: next(handles),
    }
    for name, substitute in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, substitute)
    return given


def test_graphs_share_a_pool_until_none_is_left_of_it(pools: list[int]) -> None:
    device = CudaDevice(CPU)
    graphs = [device.capture(lambda: None) for _ in range(3)]
    assert pools == [0, 0, 0]
    del graphs[1:]
    graphs.append(device.capture(lambda: None))
    assert pools[3:] == [0]
    graphs.clear()
    graphs += [device.capture(lambda: None) for _ in range(2)]
    assert pools[4:] == [1, 1]


def test_work_is_done_once_before_it_is_captured(pools: list[int]) -> None:
    num_captures: list[int] = []
    CudaDevice(CPU).capture(lambda: num_captures.append(len(pools)))
    assert num_captures == [0, 1]


def test_failed_capture_keeps_its_pool_only_if_other_graphs_use_it(pools: list[int]) -> None:
    def fail_in_capture() -> None:
        if len(pools) > num_before:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    device, num_before = CudaDevice(CPU), 0
    with pytest.raises(torch.OutOfMemoryError):
        device.capture(fail_in_capture)
    graph = device.capture(lambda: None)
    num_before = len(pools)
    with pytest.raises(torch.OutOfMemoryError):
        device.capture(fail_in_capture)
    others = [graph, device.capture(lambda: None)]
    assert pools == [0, 1, 1, 1]
    assert len(others) == 2
