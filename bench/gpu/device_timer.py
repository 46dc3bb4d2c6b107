"""Times functions on a CUDA device, excluding the time of the host between launches."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_SAMPLES, MAX_SAMPLES = 11, 101
SECONDS = 0.5  # device time of all samples together
# a sample repeats calls for this time, up to this number of calls, because the launch queue is finite
_SAMPLE_SECONDS, _MAX_CALLS = 0.002, 48
_SLEEP_CYCLES = (20_000_000, 80_000_000, 320_000_000)  # about 10, 40 and 160 ms; the first sufficient one is used


@dataclass(frozen=True)
class Timing:
    """The seconds of one call: the median of the samples, and the bounds of the fastest and the slowest tenth.

    Attributes:
        includes_host: whether the device waited for the host between calls, because the calls wait for the device.
    """

    seconds: float
    fastest_tenth: float
    slowest_tenth: float
    num_samples: int
    includes_host: bool


def measure(calls: Sequence[Callable[[], object]]) -> Timing:
    """Time the calls in rotation on the current device. Each sample is the mean over whole rotations."""
    for call in (*calls, *calls):  # compiles the kernels and fills the allocator's cache
        call()
    torch.cuda.synchronize()
    rough, _ = sample(calls, _SLEEP_CYCLES[0])
    rotations = min(max(1, _MAX_CALLS // len(calls)), int(_SAMPLE_SECONDS / rough) + 1)
    calls = list(calls) * rotations
    sleeps = (cycles for cycles in _SLEEP_CYCLES if sample(calls, cycles)[1])
    cycles = next(sleeps, 0)  # calls that wait for the device do not benefit from a sleep
    num_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(SECONDS / (rotations * rough))))
    samples = [sample(calls, cycles) for _ in range(num_samples)]
    seconds = sorted(total / len(calls) for total, _ in samples)
    tenth = num_samples // 10
    includes_host = not all(host_was_ahead for _, host_was_ahead in samples)
    return Timing(statistics.median(seconds), seconds[tenth], seconds[-1 - tenth], num_samples, includes_host)


def sample(calls: Sequence[Callable[[], object]], sleep_cycles: int) -> tuple[float, bool]:
    """Return the device's seconds for all calls in sequence, and whether the device never waited for the host.

    The device sleeps while the host launches the calls. The sleep is not counted.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(sleep_cycles)
    start.record()
    for call in calls:
        call()
    end.record()
    host_was_ahead = not start.query()
    end.synchronize()
    return start.elapsed_time(end) / 1000, host_was_ahead
