"""Writes figures as text, with the rows of `vllm bench`."""

from collections.abc import Sequence

from pagewire.bench.statistics import ServingMetrics, Summary

WIDTH = 50
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def serving_table(
    metrics: ServingMetrics,
    *,
    latencies: Sequence[str],
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    was_interrupted: bool = False,
) -> str:
    """Returns the table. `latencies` are keys of LATENCIES; `request_rate` is None where all requests are sent at
    once.
    """
    title = " Serving Benchmark Result (interrupted) " if was_interrupted else " Serving Benchmark Result "
    # Those that are None have no row.
    figures: dict[str, float | None] = {
        "Successful requests:": metrics.completed,
        "Failed requests:": metrics.failed,
        "Requests cut off:": metrics.num_cut_off if was_interrupted else None,
        "Maximum request concurrency:": max_concurrency,
        "Request rate configured (RPS):": request_rate,
        "Benchmark duration (s):": metrics.duration,
        "Total input tokens:": metrics.total_input_tokens,
        "Total generated tokens:": metrics.total_output_tokens,
        "Request throughput (req/s):": metrics.request_throughput,
        "Request goodput (req/s):": metrics.request_goodput,
        "Output token throughput (tok/s):": metrics.output_throughput,
        "Peak output token throughput (tok/s):": metrics.max_output_tokens_per_s,
        "Peak concurrent requests:": metrics.max_concurrent_requests,
        "Total token throughput (tok/s):": metrics.total_token_throughput,
    }
    lines = [title.center(WIDTH, "="), *(row(name, value) for name, value in figures.items() if value is not None)]
    for name in latencies:
        lines += _latency_rows(*LATENCIES[name], getattr(metrics, name))
    return "\n".join([*lines, "=" * WIDTH])


def row(name: str, value: float | None) -> str:
    """Returns a row. Integers are written as they are, other numbers with two digits, and n/a stands for what was not
    measured."""
    text = "n/a" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<40} {text:<10}".rstrip()


def percent_name(percent: float) -> str:
    """Returns 99 for 99.0, but 99.9 for 99.9."""
    return f"{percent:g}"


def _latency_rows(name: str, header: str, summary: Summary | None) -> list[str]:
    lines = [header.center(WIDTH, "-")]
    if summary is None:
        return [*lines, row(f"Mean {name} (ms):", None)]
    lines += [row(f"Mean {name} (ms):", summary.mean * 1e3), row(f"Median {name} (ms):", summary.median * 1e3)]
    lines += [row(f"P{percent_name(percent)} {name} (ms):", value * 1e3) for percent, value in summary.percentiles]
    return lines
