"""Tells the figures of a run: in a table, with the rows of `vllm bench`, a JSON file, with its keys, and PNG charts."""

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pagewire.bench.run import Run
from pagewire.bench.statistics import ServingMetrics, Summary, tokens_by_second
from pagewire.installation import shortage
from pagewire.options import Parser
from pagewire.server import ServerInfo, WorkerInfo

WIDTH = 50
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
SIZE_INCHES = (12.0, 3.6)
DPI = 120


def add_flags(parser: argparse.ArgumentParser, *, with_output_json: bool) -> None:
    parser.add_argument(
        "--chart", metavar="FILE", type=Path, help="draw the figures to this PNG file; needs the extra `bench`"
    )
    group = parser.add_argument_group("result")
    group.add_argument("--save-result", action="store_true", help="write the figures to a JSON file")
    group.add_argument(
        "--result-dir", metavar="DIR", default=".", help="directory of that file (default: the current one)"
    )
    group.add_argument(
        "--result-filename", metavar="NAME", help="name of that file (default: made of the load and the time)"
    )
    group.add_argument("--save-detailed", action="store_true", help="include the times of every request")
    group.add_argument(
        "--metadata", metavar="KEY=VALUE", nargs="+", default=[], type=_pair, help="include this in the file"
    )
    if with_output_json:
        group.add_argument("--output-json", metavar="FILE", help="write the figures to this file")


def path_of(parser: Parser, parsed: argparse.Namespace, stem: str) -> Path | None:
    """Returns the path for the figures, or None. Ends the command, before anything runs, if they cannot be written
    there."""
    if getattr(parsed, "output_json", None):
        path = Path(parsed.output_json)
    elif parsed.save_result:
        path = Path(parsed.result_dir) / (parsed.result_filename or f"{stem}-{datetime.now():%Y%m%d-%H%M%S}.json")
    elif parsed.result_filename or parsed.save_detailed or parsed.metadata:
        parser.error("--result-filename, --save-detailed and --metadata need --save-result")
    else:
        return None
    check_writable(parser, path)
    return path


def check_writable(parser: Parser, path: Path) -> None:
    """Makes the folder of a file; ends the command if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make the folder of {path}: {error.strerror}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"cannot write {path}: give the name of a file in a folder that you may write to")


def write(path: Path, figures: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Measured:
    """The server and model whose figures these are. A server with the OpenAI API leaves None where it does not tell."""

    backend: str
    model: str
    server_version: str | None = None
    worker: WorkerInfo | None = None

    @classmethod
    def pagewire(cls, info: ServerInfo) -> "Measured":
        return cls("pagewire", info.served_model_name, info.version, info.worker)


def figures(
    verb: str, of: Measured, parsed: argparse.Namespace, measured: Run, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of a result: when it was measured, of which model and by which server, then those that the
    verb has as its `own`, and the times of every request if the flags ask for them."""
    return {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "backend": of.backend,
        "benchmark": verb,
        "model_id": of.model,
        "server_version": of.server_version,
        "worker": None if of.worker is None else asdict(of.worker),
        "was_interrupted": measured.was_interrupted,
        **dict(parsed.metadata),
        **own,
        **(_request_details(measured) if parsed.save_detailed else {}),
    }


def serving_figures(metrics: ServingMetrics) -> dict[str, Any]:
    """Returns the figures by their keys in the file. Latencies are in milliseconds; a figure that was not measured is
    null."""
    figures: dict[str, Any] = {
        name: getattr(metrics, name)
        for name in (
            "duration", "completed", "failed", "num_cut_off", "total_input_tokens", "total_output_tokens",
            "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
            "max_output_tokens_per_s", "max_concurrent_requests",
        )
    }  # fmt: skip
    for name in LATENCIES:
        summary: Summary | None = getattr(metrics, name)
        for statistic in ("mean", "median", "std"):
            figures[f"{statistic}_{name}_ms"] = None if summary is None else getattr(summary, statistic) * 1e3
        for percent, value in () if summary is None else summary.percentiles:
            figures[f"p{percent:g}_{name}_ms"] = value * 1e3
    return figures


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


def _latency_rows(name: str, header: str, summary: Summary | None) -> list[str]:
    lines = [header.center(WIDTH, "-")]
    if summary is None:
        return [*lines, row(f"Mean {name} (ms):", None)]
    lines += [row(f"Mean {name} (ms):", summary.mean * 1e3), row(f"Median {name} (ms):", summary.median * 1e3)]
    lines += [row(f"P{percent:g} {name} (ms):", value * 1e3) for percent, value in summary.percentiles]
    return lines


def _request_details(run: Run) -> dict[str, Any]:
    """Returns columns with an entry for each request, also for those that failed. Times are in seconds."""
    records = run.records
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "start_times": [record.sent_at for record in records],
        "queue_times": [record.sent_at - record.planned_at for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "latencies": [record.latency for record in records],
        "errors": [record.error or "" for record in records],
    }


def check_chart(parser: Parser, path: Path | None) -> None:
    """Ends the command, before anything runs, if no chart can be drawn or written."""
    if path is None:
        return
    if missing := shortage("bench"):
        parser.error(f"--chart needs matplotlib, but {missing}")
    if path.suffix != ".png":
        parser.error(f"--chart: {path} is no PNG file: its name must end in .png")
    check_writable(parser, path)


def draw_run(path: Path, title: str, run: Run) -> None:
    """Draws the tokens of each second, and the shares of requests and of tokens that came within a time."""
    served = [record for record in run.records if record.error is None]
    figure, (rates, first_tokens, gaps) = _panels(title, 3)
    per_second = tokens_by_second(served)
    rates.plot(range(len(per_second)), per_second)
    _label(rates, "output tokens each second", "s", "tok/s")
    _draw_shares(first_tokens, [record.ttft for record in served if record.ttft is not None])
    _label(first_tokens, "time to first token", "ms", "share of the requests")
    _draw_shares(gaps, [itl for record in served for itl in record.itls])
    _label(gaps, "inter-token latency", "ms", "share of the gaps")
    figure.savefig(path, dpi=DPI)


def draw_latencies(path: Path, title: str, latencies: Sequence[float]) -> None:
    """Draws the latency of each iteration, and the shares that ended within a time."""
    figure, (iterations, shares) = _panels(title, 2)
    iterations.plot(range(1, len(latencies) + 1), [latency * 1e3 for latency in latencies], ".")
    _label(iterations, "latency of each iteration", "iteration", "ms")
    _draw_shares(shares, latencies)
    _label(shares, "latency", "ms", "share of the iterations")
    figure.savefig(path, dpi=DPI)


def _panels(title: str, num_panels: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, num_panels)


def _draw_shares(axes: Any, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds)
    axes.step([value * 1e3 for value in ordered], [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
    axes.set_ylim(0, 1.02)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def rate_text(rate: float) -> str:
    """Returns a rate as the file has it: infinity is a text, since JSON has none."""
    return "inf" if math.isinf(rate) else f"{rate:g}"


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key, value
