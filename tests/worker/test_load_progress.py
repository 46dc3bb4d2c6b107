"""What is told while a model loads, by a clock of the test's own."""

import logging

import pytest

from worker_service.startup.progress import LoadProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture, num_tensors: int, seconds_each: float) -> list[str]:
    """The lines of a load, and that every tensor was counted."""
    caplog.set_level(logging.INFO)
    clock, percents = Clock(), []
    progress = LoadProgress(percents.append, clock)
    for num_loaded in range(1, num_tensors + 1):
        clock.now += seconds_each
        progress(num_loaded, num_tensors)
    assert percents == [100 * num_loaded // num_tensors for num_loaded in range(1, num_tensors + 1)]
    return [record.getMessage() for record in caplog.records]


def test_a_quick_load_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 40, 0.01) == ["loaded the model's 40 tensors in 0.4 s"]


def test_a_long_one_is_told_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 36, 1.0) == [
        "loading the model: 10 of 36 tensors (27 %) in 10 s",
        "loading the model: 20 of 36 tensors (55 %) in 20 s",
        "loading the model: 30 of 36 tensors (83 %) in 30 s",
        "loaded the model's 36 tensors in 36.0 s",
    ]
