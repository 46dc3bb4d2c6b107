"""The metrics of a simulated run, and a table that compares runs. Times are in seconds, tokens are the trace's."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from scheduler_service.simulation.driver import SimulatedRun, SimulationSettings

_PERCENTS = (50, 95, 99)
# Rows of the table: the title, the path of the figure, and its format.
_ROWS = (
    ("requests", ("num_requests",), ",d"),
    ("rejected: longer than the pool", ("num_rejected",), ",d"),
    ("makespan (s)", ("makespan_s",), ",.0f"),
    ("mean session (s)", ("mean_session_s",), ",.0f"),
    *((f"time to first token, {key} (s)", ("ttft_s", key), ",.2f") for key in ("mean", "p50", "p95", "p99", "max")),
    ("longest wait until it ran (s)", ("wait_s", "max"), ",.1f"),
    ("begun after the bound on waiting", ("num_overdue",), ",d"),
    *((f"between tokens, {key} (s)", ("itl_s", key), ",.3f") for key in ("mean", "p99", "max")),
    ("prompt tokens computed (M)", ("computed_tokens",), "M"),
    ("prompt tokens needed (M)", ("needed_tokens",), "M"),
    ("computed / needed", ("computed_per_needed",), ",.2f"),
    ("tokens found on the device (M)", ("hit_tokens", "device"), "M"),
    ("tokens found on the host (M)", ("hit_tokens", "host"), "M"),
    ("preemptions", ("num_preemptions",), ",d"),
    ("fairness between sessions (1 is best)", ("fairness",), ",.3f"),
    ("goodput (requests/s)", ("goodput", "requests_per_s"), ",.4f"),
    ("requests within the goal (%)", ("goodput", "percent"), ",.1f"),
)


def figures(run: SimulatedRun, settings: SimulationSettings, ttft_goal_s: float | None = None) -> dict[str, Any]:
    """Return the measurements of a simulated run as plain data for JSON, for example total time, time to first token
    and cache hits. A measurement that does not exist is None.

    Goodput counts only the requests whose time to first token is at most `ttft_goal_s` seconds. If the goal is None, no
    goodput is computed.
    """
    assert run.stats is not None
    scale, stats = settings.speed.scale, run.stats
    ttfts = [request.first_token_at - request.arrived_at for request in run.requests]
    computed = run.num_computed_tokens * scale
    host_hits = stats.num_host_cached_prompt_tokens * scale
    return {
        "makespan_s": run.ended_at,
        "mean_session_s": mean(session.ended_at - session.started_at for session in run.sessions),
        "ttft_s": summary((ttft, 1) for ttft in ttfts),
        "wait_s": summary((request.first_scheduled_at - request.arrived_at, 1) for request in run.requests),
        "num_overdue": stats.num_overdue_requests,
        "itl_s": summary(_token_gaps(run, settings)),
        "computed_tokens": computed,
        "needed_tokens": run.num_needed_tokens,
        "computed_per_needed": computed / run.num_needed_tokens if run.num_needed_tokens else None,
        "num_requests": len(run.requests),
        "num_rejected": run.num_rejected,
        "num_preemptions": stats.num_preemptions,
        "hit_tokens": {"device": stats.num_cached_prompt_tokens * scale - host_hits, "host": host_hits},
        "session_tokens": {
            "kept": sum(stats.num_kept_session_tokens) * scale,
            "lost": sum(stats.num_lost_session_tokens) * scale,
        },
        "fairness": fairness(run),
        "goodput": None if ttft_goal_s is None else _goodput(ttfts, ttft_goal_s, run.ended_at),
    }


def table(by_policy: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a text table that compares simulated runs, with one row per measurement and one column per policy. A row
    without any value is left out.

    `by_policy` has the result of `figures` for each policy.
    """
    lines = [["", *by_policy]]
    for title, path, form in _ROWS:
        values = [_lookup(found, path) for found in by_policy.values()]
        if any(value is not None for value in values):
            lines.append([title] + [_text(value, form) for value in values])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(widths[i]) for i, cell in enumerate(line[1:], start=1))])
        for line in lines
    )


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values, or None if there are no values."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def summary(weighted: Iterable[tuple[float, int]]) -> dict[str, float] | None:
    """Return the mean, percentiles and maximum of (value, count) pairs, or None if there are no values.

    The p-th percentile is the least value such that at least p per cent of the values are no larger.
    """
    ordered = sorted(weighted)
    if not ordered:
        return None
    reached = list(accumulate(weight for _, weight in ordered))
    num_values = reached[-1]
    return {
        "mean": math.fsum(value * weight for value, weight in ordered) / num_values,
        **{f"p{percent}": ordered[bisect_left(reached, num_values * percent / 100)][0] for percent in _PERCENTS},
        "max": ordered[-1][0],
    }


def fairness(run: SimulatedRun) -> float | None:
    """Return Jain's fairness index over the slowdowns of the sessions in a simulated run, or None without sessions.

    A session's slowdown is its duration divided by its duration alone, with a prefix cache that never evicts blocks.
    The index is 1 if all sessions have the same slowdown. It falls towards 1/n if one of n sessions is slowed much more
    than all others.
    """
    slowdowns = [
        (session.ended_at - session.started_at) / session.alone_s for session in run.sessions if session.alone_s
    ]
    squares = math.fsum(slowdown**2 for slowdown in slowdowns)
    return math.fsum(slowdowns) ** 2 / (len(slowdowns) * squares) if squares else None


def _token_gaps(run: SimulatedRun, settings: SimulationSettings) -> Iterable[tuple[float, int]]:
    """Yield the times between successive output tokens of the trace, as (seconds, count).

    One simulated token represents `scale` tokens of the trace. All but one of these follow each other at the decode
    rate. The remaining token gets the rest of the measured time, including any wait.
    """
    scale, usual_s = settings.speed.scale, 1 / settings.speed.decode_rate
    for gap, count in run.gaps.items():
        yield usual_s, count * (scale - 1)
        yield gap - (scale - 1) * usual_s, count


def _goodput(ttfts: list[float], goal_s: float, makespan_s: float) -> dict[str, float | None]:
    num_good = sum(ttft <= goal_s for ttft in ttfts)
    return {
        "ttft_goal_s": goal_s,
        "requests_per_s": num_good / makespan_s if makespan_s else None,
        "percent": 100 * num_good / len(ttfts) if ttfts else None,
    }


def _lookup(found: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        found = None if found is None else found[key]
    return found


def _text(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.2f}" if form == "M" else format(value, form)
