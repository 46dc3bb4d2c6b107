"""Times functions on a CUDA device, without what the host does in between."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_SAMPLES, MAX_SAMPLES = 11, 101
SECONDS = 0.5  # on the device, of all samples
_SAMPLE_SECONDS, _MAX_CALLS = 0.002, 48  # a sample has calls for so long, and no more than that: the queue is finite
_SLEEP_CYCLES, _MAX_SLEEP_CYCLES = 20_000_000, 1 << 31  # 10 ms and more than a second


@dataclass(frozen=True)
class Timing:
    """Of one call, in seconds: the median of the samples, and what a tenth of them is not above and not below."""

    seconds: float
    fastest_tenth: float
    slowest_tenth: float
    num_samples: int


def measure(calls: Sequence[Callable[[], object]]) -> Timing:
    """Times the calls in rotation on the current device; each sample is the mean of whole rotations.

    Raises RuntimeError where the calls wait for the device.
    """
    for call in (*calls, *calls):  # compiles, and fills the cache of allocations
        call()
    torch.cuda.synchronize()
    rough = sample(calls)
    rotations = min(max(1, _MAX_CALLS // len(calls)), int(_SAMPLE_SECONDS / rough) + 1)
    calls = list(calls) * rotations
    num_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(SECONDS / (rotations * rough))))
    samples = sorted(sample(calls) / len(calls) for _ in range(num_samples))
    tenth = num_samples // 10
    return Timing(statistics.median(samples), samples[tenth], samples[-1 - tenth], num_samples)


def sample(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds that the device takes for all calls, one behind the other.

    It sleeps until all have been launched, so that it never waits for the host.
    """
    cycles = _SLEEP_CYCLES
    while cycles <= _MAX_SLEEP_CYCLES:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(cycles)
        start.record()
        for call in calls:
            call()
        end.record()
        host_was_ahead = not start.query()
        end.synchronize()
        if host_was_ahead:
            return start.elapsed_time(end) / 1000
        cycles *= 4
    raise RuntimeError("the calls cannot be launched ahead of the device: they wait for it, or take the host a second")
