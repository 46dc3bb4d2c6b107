"""Compares scheduling policies on real traces in simulated time: the production scheduler, without a model.

    python -m bench traces --traces FOLDER

The folder must contain agent_sessions.jsonl.gz (callanjfox/kv-cache-tester), mooncake_conversation.jsonl.gz (Mooncake)
and azure_conv.csv.gz (AzurePublicDataset). docs/simulation.md lists their sources. Without `--traces` the benchmark
uses samples (bench/core/traces_sample), which are too short to compare policies. Each run is a separate process. The
raw numbers are written to bench/results/traces.json, by scenario.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.goals import verdict
from bench.report import parser_of
from scheduler_service.core.policy import FairPolicy, Policy, create_policy
from scheduler_service.simulation.driver import Simulation, SimulationSettings
from scheduler_service.simulation.report import figures
from scheduler_service.simulation.trace import Trace, TraceRequest, TraceSession, read_trace
from scheduler_service.simulation.trace_worker import WorkerSpeed
from testing.record import RESULTS, machine, write

OUTPUT = RESULTS / "traces.json"
SAMPLE = Path(__file__).with_name("traces_sample")
SESSIONS, MOONCAKE, AZURE = "agent_sessions.jsonl.gz", "mooncake_conversation.jsonl.gz", "azure_conv.csv.gz"
RANDOM = "random"  # not a file: independent requests generated from a seed
STATE_TOKENS = (0, 1_600, 14)  # weights of the states of a model
SIZES = ((1, 16), (2, 32), (4, 48))  # pool size in million tokens, number of concurrent sessions
MAX_WAIT_S = 600.0
TRANSFER_RATE = 190_000.0
NUM_RANDOM = 5_000
NUM_SCALED = 1_500  # number of requests on which two scales are compared
# by size: makespan, mean session and p95 of the first token relative to fcfs, computed tokens relative to belady
GOALS = {
    (1, 16): (1.85, 2.25, 2.0, 1.10),
    (2, 32): (2.6, 3.9, 2.0, 1.10),
    (4, 48): (3.0, 5.8, 4.0, 1.15),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a scenario: the trace, the policy and the settings of the simulated server."""

    name: str
    trace: str
    policy: str
    settings: SimulationSettings
    ttft_goal_s: float | None = None
    limit: int | None = None


class MeteredPolicy(FairPolicy):
    """A policy that counts the service of each tenant while all tenants have requests waiting."""

    def __init__(self, policy: FairPolicy, num_tenants: int) -> None:
        super().__init__(policy.name, moves_keys=policy.moves_keys, max_wait_s=policy.max_wait_s)
        self._num_tenants = num_tenants
        self._num_waiting = 0
        self.served: dict[str, int] = {}

    def queued(self, tenant: str) -> None:
        self._num_waiting += 1
        super().queued(tenant)

    def unqueued(self, tenant: str) -> None:
        self._num_waiting -= 1
        super().unqueued(tenant)

    def charge(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        super().charge(tenant, num_prompt_tokens, num_output_tokens)
        if self._num_waiting == self._num_tenants:
            service = self.PROMPT_WEIGHT * num_prompt_tokens + self.OUTPUT_WEIGHT * num_output_tokens
            self.served[tenant] = self.served.get(tenant, 0) + service


# Scenarios


def closed(millions: float, sessions: int, *, host: float = 0.0, retention: str = "lru") -> SimulationSettings:
    """Return the settings of a closed loop of coding agents that share a worker."""
    return SimulationSettings(
        pool_tokens=int(millions * 1e6),
        host_tokens=int(host * 1e6),
        speed=WorkerSpeed(8_000.0, 40.0, TRANSFER_RATE, 16),
        max_sessions=sessions,
        max_think_s=300.0,
        retention=retention,
    )


def by_the_clock(millions: float, prefill_rate: float, block_size: int, scale: int) -> SimulationSettings:
    speed = WorkerSpeed(prefill_rate, 40.0, TRANSFER_RATE, scale)
    return SimulationSettings(pool_tokens=int(millions * 1e6), speed=speed, block_size=block_size)


def sessions() -> Iterator[Run]:
    for size in SIZES:
        yield Run(f"{size[0]}M/{size[1]} fcfs", SESSIONS, "fcfs", closed(*size))
        for retention in ("lru", "learned", "belady"):
            yield Run(f"{size[0]}M/{size[1]} {retention}", SESSIONS, "agent", closed(*size, retention=retention))


def host() -> Iterator[Run]:
    for millions, num in SIZES[:2]:
        yield Run(f"{millions}M/{num} device", SESSIONS, "agent", closed(millions, num))
        yield Run(f"{millions}M/{num} host", SESSIONS, "agent", closed(millions, num, host=4 * millions))


def states() -> Iterator[Run]:
    """Yield runs of models whose states weigh as much as K and V of 0, 1,600 and 14 tokens: none, about Qwen3.5-0.8B
    and LFM2-1.2B. The pools have equal numbers of blocks; the states come on top, by the rule of docs/sizing.md."""
    for millions, num in SIZES[:2]:
        settings = closed(millions, num)
        num_tokens = settings.pool_tokens
        for weight in STATE_TOKENS:
            num_states = max(3 * num_tokens // 4096, num_tokens // (15 * weight) if weight else 0)
            num_states = min(num_states, 4 * settings.max_num_seqs + 4) if weight else 0
            with_states = replace(settings, num_device_states=num_states, state_tokens=weight)
            yield Run(f"{millions}M/{num} states of {weight}", SESSIONS, "agent", with_states)


def mooncake() -> Iterator[Run]:
    for rate in (50_000, 35_000):
        for policy in ("fcfs", "agent"):
            yield Run(f"{rate} {policy}", MOONCAKE, policy, by_the_clock(4, rate, 64, 16), 5.0)


def azure() -> Iterator[Run]:
    """Yield the runs of a trace without common prefixes.

    At 12,000 tokens/s the server is busy in the bursts of the trace's hour, and its queue never builds up.
    """
    for trace, rate in ((AZURE, 12_000), (RANDOM, 12_000), (AZURE, 8_000)):
        for policy in ("priority", "agent"):
            yield Run(f"{trace.split('_')[0]} {rate} {policy}", trace, policy, by_the_clock(1, rate, 16, 4), 1.0)


def tenants() -> Iterator[Run]:
    for policy in ("fair", "agent"):
        settings = replace(closed(1, 32), tenant_shares=(1, 3))
        yield Run(policy, SESSIONS, policy, settings, limit=4_000)


def scales() -> Iterator[Run]:
    for policy in ("fcfs", "agent"):
        for scale in (4, 16):
            settings = closed(1, 16)
            settings = replace(settings, speed=replace(settings.speed, scale=scale))
            yield Run(f"{policy} {scale}", SESSIONS, policy, settings, limit=NUM_SCALED)


SCENARIOS: dict[str, Callable[[], Iterator[Run]]] = {
    "sessions": sessions,
    "host": host,
    "states": states,
    "mooncake": mooncake,
    "azure": azure,
    "tenants": tenants,
    "scales": scales,
}


# Running


def random_trace(seed: int) -> Trace:
    """Return a trace of requests without common prefixes: 5 a second, with prompts of 100 to 8,000 tokens."""
    rng = random.Random(seed)
    at, made = 0.0, []
    for i in range(NUM_RANDOM):
        at += rng.expovariate(5.0)
        num_prompt = round(min(8_000, max(100, rng.lognormvariate(7.0, 1.0))))
        num_output = 1 + round(rng.expovariate(1 / 200))
        made.append(TraceSession(str(i), at, (TraceRequest(0.0, num_prompt, num_output, (), num_prompt),)))
    return Trace("random", block_size=0, shares_blocks=False, sessions=tuple(made))


def simulate(run: Run, folder: Path, limit: int | None) -> dict[str, Any]:
    """Simulate a trace and return its figures."""
    started_at = time.monotonic()
    limit = min(filter(None, (run.limit, limit)), default=None)
    trace = random_trace(0) if run.trace == RANDOM else read_trace(folder / run.trace, limit)
    policy: Policy = create_policy(run.policy, MAX_WAIT_S)
    if isinstance(policy, FairPolicy) and run.settings.tenant_shares:
        policy = MeteredPolicy(policy, len(run.settings.tenant_shares))
    found = figures(Simulation(trace, policy, run.settings).run(), run.settings, run.ttft_goal_s)
    if isinstance(policy, MeteredPolicy):
        total = sum(policy.served.values())
        found["tenant_shares"] = {tenant: count / total for tenant, count in sorted(policy.served.items())}
    return found | {"policy": run.policy, "wall_s": time.monotonic() - started_at}


# Reports


def ratio(first: dict[str, Any], second: dict[str, Any], *path: str) -> float:
    """Return the ratio of a figure in `first` to the same figure in `second`."""
    for key in path:
        first, second = first[key], second[key]
    return float(first) / float(second)  # type: ignore[arg-type]


def goal(value: float, bound: float, *, at_least: bool = True) -> str:
    return f"{value:.2f} {verdict(value, bound, at_least=at_least)}"


def report_sessions(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["makespan, mean session, p95 of the first token; computed / belady's; longest wait / bound; overdue"]
    for size, (makespan, session, first, computed) in GOALS.items():
        name = f"{size[0]}M/{size[1]}"
        base, best = found[f"{name} fcfs"], found[f"{name} belady"]
        for retention in ("lru", "learned", "belady"):
            ours = found[f"{name} {retention}"]
            parts = [
                goal(ratio(base, ours, "makespan_s"), makespan),
                goal(ratio(base, ours, "mean_session_s"), session),
                goal(ratio(base, ours, "ttft_s", "p95"), first),
                goal(ratio(ours, best, "computed_tokens"), computed, at_least=False),
                goal(ours["wait_s"]["max"] / MAX_WAIT_S, 1.4, at_least=False),
                f"{ours['num_overdue'] / ours['num_requests']:.1%}",
            ]
            lines.append(f"{name} {retention:8} " + "  ".join(parts))
    return lines


def report_states(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for millions, num in SIZES[:2]:
        base, *others = (found[f"{millions}M/{num} states of {weight}"] for weight in STATE_TOKENS)
        ratios = [ratio(other, base, "computed_tokens") for other in others]
        lines.append(
            f"{millions}M/{num}: computed tokens / without states: "
            + ", ".join(
                f"{goal(value, 1.1, at_least=False)} for states of {weight} tokens"
                for value, weight in zip(ratios, STATE_TOKENS[1:], strict=True)
            )
        )
    return lines


def report_host(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for millions, num in SIZES[:2]:
        device, with_host = found[f"{millions}M/{num} device"], found[f"{millions}M/{num} host"]
        waste = [run["computed_tokens"] - run["needed_tokens"] for run in (device, with_host)]
        lines.append(
            f"{millions}M/{num}: computed - needed, without / with a host tier: {goal(waste[0] / waste[1], 2)}"
        )
    return lines


def report_by_the_clock(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, run in found.items():
        first = run["ttft_s"]
        lines.append(
            f"{name:22} makespan {run['makespan_s']:7.0f} s, "
            f"first token mean {first['mean']:.2f} p95 {first['p95']:.2f} p99 {first['p99']:.2f} "
            f"max {first['max']:.2f} s, "
            f"within the goal {run['goodput']['percent']:.1f} %, "
            f"goodput {run['goodput']['requests_per_s']:.3f}/s"
        )
    names = list(found)
    for base, ours in zip(names[::2], names[1::2], strict=True):
        text = f"{ratio(found[ours], found[base], 'goodput', 'requests_per_s'):.3f}"
        lines.append(
            f"{ours}: goodput {text} times, makespan {ratio(found[ours], found[base], 'makespan_s'):.3f} times"
        )
    return lines


def report_tenants(found: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name}: share while both wait (due: 0.5 +- 0.025): {run['tenant_shares']}" for name, run in found.items()]


def report_scales(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for policy in ("fcfs", "agent"):
        for key in ("makespan_s", "mean_session_s", "computed_tokens"):
            difference = abs(ratio(found[f"{policy} 16"], found[f"{policy} 4"], key) - 1)
            percent = goal(100 * difference, 3, at_least=False)
            lines.append(f"{policy}: per cent by which {key} at scale 16 and 4 differ: {percent}")
    return lines


REPORTS: dict[str, Callable[[dict[str, dict[str, Any]]], list[str]]] = {
    "sessions": report_sessions,
    "states": report_states,
    "host": report_host,
    "mooncake": report_by_the_clock,
    "azure": report_by_the_clock,
    "tenants": report_tenants,
    "scales": report_scales,
}


def measure(scenario: str, folder: Path, limit: int | None, jobs: int) -> dict[str, dict[str, Any]]:
    """Simulate all runs of a scenario, and return their figures by the name of the run."""
    runs = {run.name: run for run in SCENARIOS[scenario]()}
    done: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, max_tasks_per_child=1) as pool:
        futures = {pool.submit(partial(simulate, run, folder, limit)): name for name, run in runs.items()}
        for future in as_completed(futures):
            name = futures[future]
            done[name] = future.result()
            text = f"{scenario}, {len(done)} of {len(runs)}: {name} in {done[name]['wall_s']:.0f} s"
            print(text, file=sys.stderr, flush=True)
    return {name: done[name] for name in runs}


def main(flags: Sequence[str]) -> None:
    parser = parser_of("traces", __doc__)
    parser.add_argument(
        "--traces", type=Path, default=SAMPLE, help="the folder with the traces (default: short samples)"
    )
    parser.add_argument(
        "--scenarios", default=",".join(SCENARIOS), help="comma-separated scenarios (default: %(default)s)"
    )
    parser.add_argument("--limit-requests", type=int, help="use the beginning of each trace, for a quick look")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    arguments = parser.parse_args(flags)
    names = arguments.scenarios.split(",")
    if unknown := set(names) - set(SCENARIOS):
        parser.error(f"--scenarios {', '.join(sorted(unknown))}: choose from {', '.join(SCENARIOS)}")
    missing = [name for name in (SESSIONS, MOONCAKE, AZURE) if not (arguments.traces / name).is_file()]
    if missing:
        parser.error(
            f"{arguments.traces} lacks {', '.join(missing)}; docs/simulation.md lists the sources of the traces"
        )
    is_whole = arguments.limit_requests is None and arguments.traces != SAMPLE
    if not is_whole:
        print("this run uses only the beginnings of the traces: its figures are not stored", file=sys.stderr)
    for scenario in names:
        found = measure(scenario, arguments.traces, arguments.limit_requests, arguments.jobs)
        print("\n".join([f"\n{scenario}", *REPORTS[scenario](found)]), flush=True)
        if is_whole:
            kept = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
            write(OUTPUT, kept | {"machine": machine(), scenario: found})
