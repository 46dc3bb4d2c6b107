"""Draws PNG charts of a run. They need matplotlib, which only the extra `bench` installs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewire.bench import result
from pagewire.bench.run import Run
from pagewire.bench.statistics import tokens_by_second
from pagewire.installation import shortage
from pagewire.options import Parser

SIZE_INCHES = (12.0, 3.6)
DPI = 120


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chart", metavar="FILE", type=Path, help="draw the figures to this PNG file; needs the extra `bench`"
    )


def check(parser: Parser, path: Path | None) -> None:
    """Ends the command, before anything runs, if no chart can be drawn or written."""
    if path is None:
        return
    if missing := shortage("bench"):
        parser.error(f"--chart needs matplotlib, but {missing}")
    if path.suffix != ".png":
        parser.error(f"--chart: {path} is no PNG file: its name must end in .png")
    result.check_writable(parser, path)


def draw_run(path: Path, title: str, run: Run) -> None:
    """Draws the tokens of each second, and the shares of requests and of tokens that came within a time."""
    served = [record for record in run.records if record.error is None]
    figure, (rates, first_tokens, gaps) = _figure(title, 3)
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
    figure, (iterations, shares) = _figure(title, 2)
    iterations.plot(range(1, len(latencies) + 1), [latency * 1e3 for latency in latencies], ".")
    _label(iterations, "latency of each iteration", "iteration", "ms")
    _draw_shares(shares, latencies)
    _label(shares, "latency", "ms", "share of the iterations")
    figure.savefig(path, dpi=DPI)


def _figure(title: str, num_panels: int) -> tuple[Any, Any]:
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
