"""The latencies of the sequences that ended recently, for reports to operators."""

from collections import deque
from collections.abc import Sequence

from scheduler_service.core.request import Request, SequenceEnd
from scheduler_service.serving.observer import NON_FAILURES, Observer

NUM_SEQUENCES = 1000


class RecentLatencies(Observer):
    """An observer of the step loop that keeps the latencies of the last `NUM_SEQUENCES` sequences that ended with
    output tokens and without a failure. Unlike a metric's buckets, these measured values have exact percentiles."""

    def __init__(self) -> None:
        # By the name of the latency in GetLoads' answer, in seconds.
        self._seconds: dict[str, deque[float]] = {
            name: deque(maxlen=NUM_SEQUENCES) for name in ("time_to_first_token", "time_per_output_token", "queue_time")
        }

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        if end.reason not in NON_FAILURES or end.first_scheduled_at is None or end.first_token_at is None:
            return
        self._seconds["time_to_first_token"].append(end.first_token_at - end.arrived_at)
        self._seconds["queue_time"].append(end.first_scheduled_at - end.arrived_at)
        if end.num_output_tokens > 1:
            self._seconds["time_per_output_token"].append((now - end.first_token_at) / (end.num_output_tokens - 1))

    def summaries(self) -> dict[str, dict[str, float]]:
        """Return the fields of the message `Latency` for each latency, by the name of the latency. A latency without
        values is left out."""
        return {name: _summary(sorted(seconds)) for name, seconds in self._seconds.items() if seconds}


def _summary(ordered: Sequence[float]) -> dict[str, float]:
    """Return the number, the mean and two percentiles of sorted values."""
    count = len(ordered)
    p50, p99 = (ordered[-(-percent * count // 100) - 1] for percent in (50, 99))
    return {"num_sequences": count, "mean": sum(ordered) / count, "p50": p50, "p99": p99}
