"""`pagewire simulate`: drives the scheduler through a request trace in simulated time, without a model."""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagewire.cli.client_flags import count, count_or_zero, names_among, number, positive
from pagewire.client.errors import CommandError
from pagewire.installation import shortage
from pagewire.options import Parser
from scheduler_service.core.policy import DEFAULT_MAX_WAIT_S, POLICIES, create_policy
from scheduler_service.simulation.driver import RETENTIONS, SimulatedRun, Simulation, SimulationSettings
from scheduler_service.simulation.report import figures, table
from scheduler_service.simulation.trace import Trace, TraceError, read_trace
from scheduler_service.simulation.trace_worker import WorkerSpeed

PROGRESS_INTERVAL_S = 10.0
DESCRIPTION = (
    "Run the scheduler with a trace of requests in simulated time, against a worker that is only a model of its speed, "
    "and compare policies. No model, worker or server is needed."
)
FORMS = (
    "FILE contains coding-agent sessions (a JSON line each: session, block_size, requests), requests of Mooncake "
    "(timestamp, input_length, output_length, hash_ids) or of Azure (CSV: TIMESTAMP,ContextTokens,GeneratedTokens), "
    "plain or gzipped. A session sends a request when the previous one is answered and its thinking time is over; "
    "all other requests are sent at their timestamps."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command `pagewire simulate`, which drives the scheduler through a request trace in simulated time. Return
    0.

    Raise CommandError if the trace cannot be read. End the command if the trace does not fit the flags.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    for path in (parsed.json, parsed.chart):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write {path}: give the name of a file in an existing folder")
    settings = _settings(parsed)
    try:
        trace = read_trace(parsed.trace, parsed.limit_requests)
        settings.check(trace)
    except OSError as error:
        raise CommandError(f"cannot read {parsed.trace}: {error.strerror}") from None
    except TraceError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        parser.error(str(error))
    print(f"{parsed.trace}: {trace.form}, {trace.num_requests:,} requests", file=sys.stderr)
    by_policy = {name: _simulate(trace, name, settings, parsed) for name in parsed.policy}
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(by_policy, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(table(by_policy))
    if parsed.chart is not None:
        draw(by_policy, parsed.chart)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="pagewire simulate", description=DESCRIPTION, epilog=FORMS)
    load = parser.add_argument_group("load")
    load.add_argument("--trace", metavar="FILE", type=Path, required=True, help="the trace; its format is detected")
    load.add_argument("--limit-requests", metavar="N", type=count, help="use only the first N requests of the trace")
    load.add_argument(
        "--sessions",
        metavar="N",
        type=count,
        help="at most N sessions at once; the next one begins when one ends (default: all)",
    )
    load.add_argument("--max-think", metavar="S", type=_zero_or_more, help="cut pauses between requests to S seconds")
    worker = parser.add_argument_group("worker", "All sizes and rates are in tokens.")
    worker.add_argument(
        "--pool-tokens", metavar="N", type=count, required=True, help="capacity of the worker's KV cache"
    )
    worker.add_argument(
        "--host-tokens", metavar="N", type=count_or_zero, default=0, help="capacity of the host tier (default: 0)"
    )
    worker.add_argument(
        "--prefill-rate", metavar="RATE", type=_positive, required=True, help="prompt tokens computed per second"
    )
    worker.add_argument(
        "--decode-rate", metavar="RATE", type=_positive, required=True, help="output tokens per second of each sequence"
    )
    worker.add_argument(
        "--transfer-rate",
        metavar="RATE",
        type=_positive,
        default=100_000.0,
        help="tokens per second between device and host, each way (default: 100000)",
    )
    worker.add_argument("--block-size", metavar="N", type=count, default=64, help="tokens of a block (default: 64)")
    worker.add_argument("--max-num-seqs", metavar="N", type=count, default=256, help="rows at once (default: 256)")
    worker.add_argument(
        "--max-num-batched-tokens",
        metavar="N",
        type=count,
        help="maximum tokens of a step (default: the prompt tokens that are computed in the time of one output token)",
    )
    worker.add_argument(
        "--step-overhead",
        metavar="S",
        type=_zero_or_more,
        default=0.0,
        help="additional seconds of each step that computes prompts (default: 0)",
    )
    _add_scheduling_flags(parser)
    return parser


def _add_scheduling_flags(parser: Parser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--policy",
        metavar="NAME[,NAME]",
        type=_policies,
        default=[POLICIES[0]],
        help=f"policies to compare: {', '.join(POLICIES)} (default: {POLICIES[0]})",
    )
    group.add_argument(
        "--max-wait",
        metavar="S",
        type=_zero_or_more,
        default=DEFAULT_MAX_WAIT_S,
        help="seconds after which a waiting request precedes all later ones of its tenant and priority; only for "
        f"the policy agent (default: {DEFAULT_MAX_WAIT_S:.0f})",
    )
    group.add_argument(
        "--retention",
        choices=RETENTIONS,
        default=RETENTIONS[0],
        help="whose idle blocks the policy agent keeps: lru: of sessions used last; learned: of sessions expected to "
        f"return soon; belady, an upper bound: of sessions that return first in the trace (default: {RETENTIONS[0]})",
    )
    group.add_argument(
        "--session-tenants",
        action="store_true",
        help="make each session a tenant of its own, for instance for the policy fair",
    )
    result = parser.add_argument_group("simulation and result")
    result.add_argument(
        "--scale",
        metavar="N",
        type=count,
        default=16,
        help="let one simulated token stand for N tokens: faster, but coarser (default: 16)",
    )
    result.add_argument(
        "--ttft-goal",
        metavar="S",
        type=_zero_or_more,
        help="count the requests whose first token arrives within S seconds",
    )
    result.add_argument("--json", metavar="OUT", type=Path, help="write the figures of each policy to this file")
    result.add_argument(
        "--chart", metavar="FILE", type=Path, help="draw the figures to this PNG file; needs matplotlib"
    )


def _settings(parsed: argparse.Namespace) -> SimulationSettings:
    speed = WorkerSpeed(
        parsed.prefill_rate,
        parsed.decode_rate,
        parsed.transfer_rate,
        parsed.scale,
        parsed.step_overhead,
        parsed.max_num_batched_tokens,
    )
    return SimulationSettings(
        pool_tokens=parsed.pool_tokens,
        host_tokens=parsed.host_tokens,
        speed=speed,
        block_size=parsed.block_size,
        max_sessions=parsed.sessions,
        max_think_s=parsed.max_think,
        max_num_seqs=parsed.max_num_seqs,
        has_session_tenants=parsed.session_tenants,
        retention=parsed.retention,
    )


def _simulate(trace: Trace, name: str, settings: SimulationSettings, parsed: argparse.Namespace) -> dict[str, Any]:
    started_at = time.monotonic()
    run = Simulation(trace, create_policy(name, parsed.max_wait), settings).run(_progress(name, trace.num_requests))
    if run.num_rejected:
        print(f"{name}: {run.num_rejected} requests are longer than the pool and were left out", file=sys.stderr)
    found = figures(run, settings, parsed.ttft_goal)
    return found | {"wall_s": time.monotonic() - started_at, "num_steps": run.num_steps}


def _progress(name: str, num_requests: int) -> Callable[[SimulatedRun, float], None]:
    """Return a callback that prints the progress of a simulation to standard error every ten seconds."""
    started_at = written_at = time.monotonic()

    def write(run: SimulatedRun, now: float) -> None:
        nonlocal written_at
        clock = time.monotonic()
        if clock - written_at >= PROGRESS_INTERVAL_S:
            written_at = clock
            text = f"{len(run.requests):,} of {num_requests:,} requests, {now:,.0f} s simulated"
            print(f"{name}: {text} in {clock - started_at:.0f} s", file=sys.stderr, flush=True)

    return write


def draw(by_policy: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the results of the simulated scheduling policies as bar charts, and write them to a PNG file. Each chart
    shows one result with a bar for each policy. Without matplotlib, print a notice instead."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no chart: {shortage('bench')}", file=sys.stderr)
        return
    names = list(by_policy)
    panels: dict[str, list[float]] = {
        "makespan, s": [by_policy[name]["makespan_s"] for name in names],
        "mean session, s": [by_policy[name]["mean_session_s"] or 0.0 for name in names],
        "time to first token, p95, s": [(by_policy[name]["ttft_s"] or {"p95": 0.0})["p95"] for name in names],
        "prompt tokens computed / needed": [by_policy[name]["computed_per_needed"] or 0.0 for name in names],
    }
    figure = Figure(figsize=(3.2 * len(panels), 0.4 * len(names) + 1.4), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.barh(names, values)
        axes.invert_yaxis()
        axes.set_title(title, fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _policies(text: str) -> list[str]:
    return list(dict.fromkeys(names_among(POLICIES)(text)))


def _positive(text: str) -> float:
    value = positive(text)
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _zero_or_more(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value
