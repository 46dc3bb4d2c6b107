"""Times functions on a CUDA device, without what the host does in between."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_SAMPLES, MAX_SAMPLES = 11, 101
SECONDS = 0.5  # on the device, of all samples
_SAMPLE_SECONDS, _MAX_CALLS = 0.002, 48  # a sample has calls for so long, and no more than that: the queue is finite
_SLEEP_CYCLES = (20_000_000, 80_000_000, 320_000_000)  # about 10, 40 and 160 ms: the first that is enough


@dataclass(frozen=True)
class Timing:
    """The seconds of one call: the median of the samples, and bounds that a tenth of them lies below or above.

    Attributes:
        includes_host: whether the device waited for the host meanwhile: the calls wait for the device themselves.
    """

    seconds: float
    fastest_tenth: float
    slowest_tenth: float
    num_samples: int
    includes_host: bool


def measure(calls: Sequence[Callable[[], object]]) -> Timing:
    """Times the calls in rotation on the current device; each sample is the mean of whole rotations."""
    for call in (*calls, *calls):  # compiles, and fills the cache of allocations
        call()
    torch.cuda.synchronize()
    rough, _ = sample(calls, _SLEEP_CYCLES[0])
    rotations = min(max(1, _MAX_CALLS // len(calls)), int(_SAMPLE_SECONDS / rough) + 1)
    calls = list(calls) * rotations
    sleeps = (cycles for cycles in _SLEEP_CYCLES if sample(calls, cycles)[1])
    cycles = next(sleeps, 0)  # of no use to calls that wait for the device
    num_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(SECONDS / (rotations * rough))))
    samples = [sample(calls, cycles) for _ in range(num_samples)]
    seconds = sorted(total / len(calls) for total, _ in samples)
    tenth = num_samples // 10
    includes_host = not all(host_was_ahead for _, host_was_ahead in samples)
    return Timing(statistics.median(seconds), seconds[tenth], seconds[-1 - tenth], num_samples, includes_host)


def sample(calls: Sequence[Callable[[], object]], sleep_cycles: int) -> tuple[float, bool]:
    """Seconds that the device takes for all calls, one behind the other, and whether it never waited for the host.

    It sleeps while they are launched; the sleep is not counted.
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
