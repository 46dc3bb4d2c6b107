"""Finds the idle time of a device between steps, and the kernels of a step, in a trace of `pagewire worker --profile`.

The worker marks the launches of each step. Each operation on the device has the correlation id of the call that
launched it or its graph. The correlation id assigns the operation to a step.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from worker_service.runner.profile import STEP_PREFIX

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class StepTimes:
    """The seconds of consecutive steps on the device."""

    num_steps: int
    total: float  # from the first operation of the first step to the end of the last operation of the last step
    idle_between: float  # sum of the gaps from the last operation of a step to the first operation of the next


@dataclass(frozen=True)
class KernelRow:
    """A kernel in the steps of a trace: its calls per step, and the microseconds of all these calls together."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True)
class StepTable:
    """The kernels of a step, averaged over the steps of a trace, the longest first. Times are in microseconds.

    Attributes:
        span: from the first operation of a step to the end of the last.
        gaps: the part of the span in which the stream runs no operation.
        launches: number of host calls that launch operations; a graph counts as one.
    """

    num_steps: int
    span: float
    gaps: float
    launches: float
    kernels: tuple[KernelRow, ...]


def step_times(trace: dict[str, Any]) -> StepTimes:
    """Return the times of a trace. Raises ValueError if the trace has fewer than two steps on a device."""
    ordered = sorted(_span(operations) for operations in _operations(trace))
    gaps = [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(ordered)]
    return StepTimes(len(ordered), (ordered[-1][1] - ordered[0][0]) / 1e6, sum(gaps) / 1e6)


def step_table(trace: dict[str, Any]) -> StepTable:
    """Return the kernels of a trace's steps. Raises ValueError if the trace has fewer than two steps on a device."""
    steps = _operations(trace)
    calls, totals = Counter[str](), Counter[str]()
    for event in itertools.chain.from_iterable(steps):
        calls[event["name"]] += 1
        totals[event["name"]] += event["dur"]
    spans = [end - start for start, end in map(_span, steps)]
    launches = sum(len({event["args"]["correlation"] for event in operations}) for operations in steps)
    rows = [KernelRow(name, calls[name] / len(steps), total / len(steps)) for name, total in totals.most_common()]
    gaps = max(0.0, sum(spans) - totals.total()) / len(steps)
    return StepTable(len(steps), sum(spans) / len(steps), gaps, launches / len(steps), tuple(rows))


def _span(operations: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the start of the first operation and the end of the last one, in microseconds."""
    return min(event["ts"] for event in operations), max(event["ts"] + event["dur"] for event in operations)


def _operations(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the operations of each step on the stream of the forward passes."""
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
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in on_device:
        step = step_of.get(event["args"].get("correlation"))
        if step is not None and event["args"].get("stream") == stream:
            found[step].append(event)
    if len(found) < 2:
        raise ValueError(
            f"the trace has {len(found)} steps on a device and {len(windows)} launched steps; at least 2 are needed"
        )
    return list(found.values())


def _busiest_stream(on_device: list[dict[str, Any]]) -> object:
    """Return the busiest stream, which runs the forward passes. Results are copied on another stream."""
    busy: dict[object, float] = defaultdict(float)
    for event in on_device:
        busy[event["args"].get("stream")] += event["dur"]
    return max(busy, key=lambda stream: busy[stream], default=None)
