"""Finds how long a device is idle between steps, in a trace that `pagewire worker --profile` has written.

The worker marks what launches a step. Each operation on the device bears the correlation id of the call that launched
it, or the graph that it is part of: so each belongs to a step.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from worker_service.runner.profile import STEP_PREFIX

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of steps that follow each other on the device."""

    num_steps: int
    total: float  # from the first operation of the first to the last of the last
    idle_between: float  # from the last operation of one to the first of the next, all together


def step_times(trace: dict[str, Any]) -> StepTimes:
    """Reads the times of a trace. Raises ValueError for one with fewer than two steps on a device."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    windows = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP_PREFIX)
    ]
    step_of = {
        event["args"]["correlation"]: index
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
        for index, (start, end) in enumerate(windows)
        if start <= event["ts"] <= end
    }
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    stream = _busiest_stream(on_device)
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in on_device:
        step = step_of.get(event["args"].get("correlation"))
        if step is not None and event["args"].get("stream") == stream:
            spans[step].append((event["ts"], event["ts"] + event["dur"]))
    ordered = sorted((min(starts), max(ends)) for starts, ends in (zip(*span, strict=True) for span in spans.values()))
    if len(ordered) < 2:
        raise ValueError(f"the trace has {len(ordered)} steps on a device, and {len(windows)} that were launched")
    gaps = [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(ordered)]
    return StepTimes(len(ordered), (ordered[-1][1] - ordered[0][0]) / 1e6, sum(gaps) / 1e6)


def _busiest_stream(on_device: list[dict[str, Any]]) -> object:
    """Returns the stream of the forward passes: results are copied on another."""
    busy: dict[object, float] = defaultdict(float)
    for event in on_device:
        busy[event["args"].get("stream")] += event["dur"]
    return max(busy, key=lambda stream: busy[stream], default=None)
