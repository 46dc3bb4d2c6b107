"""Computes the figures of a table from the records of a run. It is pure; times are in seconds."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagewire.bench.run import RequestRecord, Run

# What a service level objective can be given for.
OBJECTIVES = ("ttft", "tpot", "e2el")


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` per cent of the values lie, interpolated linearly as numpy does.

    Raises ValueError without a value.
    """
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of many values. `std` is that of the whole population, `percentiles` are (per cent, value)."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


def summarize(values: Sequence[float], percents: Sequence[float]) -> Summary | None:
    """Returns the statistics of some values, or None if there are none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return Summary(mean, percentile(values, 50), std, tuple((p, percentile(values, p)) for p in percents))


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """The figures of a run. Rates are per second of `duration`; None stands where nothing was measured.

    Requests that were cut off count with the tokens that they got, but have neither `tpot` nor `e2el`; those that
    failed count with nothing. `request_goodput` is of the finished requests that met every objective.
    """

    duration: float
    completed: int
    failed: int
    num_cut_off: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2el: Summary | None


def measure(run: Run, percents: Sequence[float], objectives: Mapping[str, float]) -> ServingMetrics:
    """Computes the figures of a run. `objectives` are times in seconds by their names in OBJECTIVES; without any there
    is no goodput."""
    served = [record for record in run.records if record.error is None]
    finished = [record for record in served if record.is_finished]
    num_input = sum(record.num_prompt_tokens for record in served if record.arrivals)
    num_output = sum(record.num_output_tokens for record in served)
    num_good = sum(is_good(record, objectives) for record in finished)
    duration = run.duration
    return ServingMetrics(
        duration=duration,
        completed=len(finished),
        failed=len(run.records) - len(served),
        num_cut_off=len(served) - len(finished),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=_rate(len(finished), duration),
        request_goodput=_rate(num_good, duration) if objectives else None,
        output_throughput=_rate(num_output, duration),
        total_token_throughput=_rate(num_input + num_output, duration),
        max_output_tokens_per_s=float(max(tokens_by_second(served), default=0)),
        max_concurrent_requests=peak_concurrency(served),
        ttft=summarize([record.ttft for record in served if record.ttft is not None], percents),
        tpot=summarize([record.tpot for record in finished if record.tpot is not None], percents),
        itl=summarize([itl for record in served for itl in record.itls], percents),
        e2el=summarize([record.latency for record in finished], percents),
    )


def is_good(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Returns whether a finished request met every objective. One of a single token has no time per token, which meets
    any."""
    # A request without a token meets no objective for its first one: nothing is below NaN.
    ttft = math.nan if record.ttft is None else record.ttft
    times = {"ttft": ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(times[name] <= limit for name, limit in objectives.items())


def tokens_by_second(records: Sequence[RequestRecord]) -> list[int]:
    """Returns the tokens that came in each second from the first request that was sent."""
    if not any(record.arrivals for record in records):
        return []
    start = min(record.sent_at for record in records)
    counts: Counter[int] = Counter()
    for record in records:
        for arrival in record.arrivals:
            counts[math.floor(arrival.at - start)] += arrival.num_tokens
    return [counts[second] for second in range(max(counts) + 1)]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Returns the most requests that were under way at the same time. One that begins when another ends is not beside
    it."""
    events = sorted([(r.sent_at, 1) for r in records] + [(r.ended_at, -1) for r in records])
    return max(accumulate(change for _, change in events), default=0)


def _rate(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
