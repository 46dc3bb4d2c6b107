"""Log lines and reports during loading, with a fake clock."""

import logging

import pytest

from worker_service.startup.progress import LoadProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture, num_tensors: int, seconds_each: float) -> list[str]:
    """Return the log lines of a load that begins after the compilation of kernels and reports every tensor."""
    caplog.set_level(logging.INFO)
    clock, doings = Clock(), []
    progress = LoadProgress(doings.append, clock)
    clock.now += 9.0
    progress.tell("compiling the CPU kernels: 8 of 8 units")
    progress.begin_tensors(None)
    for num_loaded in range(1, num_tensors + 1):
        clock.now += seconds_each
        progress(num_loaded, num_tensors)
    assert doings[:2] == ["compiling the CPU kernels: 8 of 8 units", "loading the model"]
    assert [doing.partition(" tensors")[0] for doing in doings[2:-1]] == [
        f"loading the model: {num_loaded} of {num_tensors}" for num_loaded in range(1, num_tensors)
    ]
    assert doings[-1] == "packing the weights, making room for the KV cache"
    return [record.getMessage() for record in caplog.records]


def test_a_quick_load_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 40, 0.01) == ["loaded the model's 40 tensors in 0.4 s"]


def test_a_long_one_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 36, 1.0) == [
        "loading the model: 1 of 36 tensors (2 %) in 1 s",
        "loading the model: 11 of 36 tensors (30 %) in 11 s",
        "loading the model: 21 of 36 tensors (58 %) in 21 s",
        "loading the model: 31 of 36 tensors (86 %) in 31 s",
        "loaded the model's 36 tensors in 36.0 s",
    ]
