"""Compares `pagewire simulate` with both services on sessions of coding agents in a closed loop.

    taskset -c 1 python -m bench sessions --trace agent_sessions.jsonl.gz

Sessions are reduced to the size of the bundled model and written as a trace (`--keep-trace FILE`). Both services run as
processes, with too few blocks for the concurrent sessions. The worker has one thread, and all processes share the given
cores. A session's prompt consists of its previous prompt, the server's answer, and the addition of the trace. The
modelled worker is fitted to a run of other sessions, for which the scheduler records its steps. The compared runs are
not recorded. The raw numbers are written to bench/results/sessions.ISA.json.
"""

import argparse
import asyncio
import gzip
import json
import math
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.goals import verdict
from bench.peers.peers import compute_with
from bench.services.cores import Cores
from bench.services.recorded_steps import fit, read_steps
from bench.services.small_sessions import Reduction, Session, random_session, reduce_sessions, write_sessions
from pagewire import AsyncClient, SamplingParams
from scheduler_service.core.policy import POLICIES, create_policy
from scheduler_service.simulation.driver import Simulation, SimulationSettings
from scheduler_service.simulation.report import mean, summary
from scheduler_service.simulation.trace import Trace, TraceContent, read_trace
from scheduler_service.simulation.trace_worker import WorkerSpeed
from testing.services import running

MODEL = Path("models/storyteller")
FIRST_TOKEN, VOCAB_SIZE = 1, 1024  # of the bundled model; its token 0 is the end of text
BLOCK_SIZE, MAX_CONTEXT, MAX_OUTPUT = 16, 2000, 32
MAX_THINK_S = 60.0  # in the trace's time
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512
MAX_ATTEMPTS, MAX_SHARE_OF_OTHERS = 3, 0.02  # repetitions of runs that other processes disturb
GOAL_COMPUTED, GOAL_MAKESPAN = 0.05, 0.25
TITLES = {
    "makespan_s": "makespan (s)",
    "mean_session_s": "mean session (s)",
    "ttft_mean_s": "time to first token, mean (s)",
    "ttft_p50_s": "time to first token, p50 (s)",
    "ttft_p95_s": "time to first token, p95 (s)",
    "ttft_max_s": "time to first token, max (s)",
    "prompt_tokens": "prompt tokens",
    "computed_tokens": "prompt tokens computed",
    "preemptions": "preemptions",
}


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters that the services and the simulation share."""

    num_blocks: int
    max_sessions: int  # concurrent sessions

    def settings(self, speed: WorkerSpeed) -> SimulationSettings:
        return SimulationSettings(
            pool_tokens=self.num_blocks * BLOCK_SIZE,
            speed=speed,
            block_size=BLOCK_SIZE,
            max_sessions=self.max_sessions,
            max_num_seqs=MAX_NUM_SEQS,
        )


class SessionText:
    """The token ids of a session, derived from content numbers and positions, except for the tokens that the server
    generated."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], int] = {}  # by position and content

    def prompt(self, contents: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, given as content numbers."""
        tokens = [token_of(content, position) for position, content in enumerate(contents)]
        for (position, content), token in self._written.items():
            if position < len(contents) and contents[position] == content:
                tokens[position] = token
        return tokens

    def write(self, position: int, contents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Store the tokens that the server generated for the contents from `position` on."""
        pairs = zip(contents, token_ids, strict=True)
        self._written |= {(position + i, content): token for i, (content, token) in enumerate(pairs)}


def token_of(content: int, position: int) -> int:
    """Return a pseudorandom token for a content and a position. Equal arguments give equal tokens."""
    mixed = (content * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return FIRST_TOKEN + (mixed >> 33) % (VOCAB_SIZE - FIRST_TOKEN)


class Replay:
    """Sends the requests of a trace. Each request follows the answer to the previous one, after the thinking time."""

    def __init__(self, client: AsyncClient, trace: Trace, max_sessions: int) -> None:
        content = TraceContent(trace, 1)
        self._client = client
        self._trace = trace
        self._contents = [
            [content.tokens(index, number) for number in range(len(session.requests))]
            for index, session in enumerate(trace.sessions)
        ]
        self._unstarted = deque(range(len(trace.sessions)))
        self._max_sessions = max_sessions
        self._ttfts_s: list[float] = []
        self._sessions_s: list[float] = []

    async def run(self) -> dict[str, float]:
        """Serve the whole trace. Return the figures of `TITLES`."""
        before, started_at = await self._client.loads(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._max_sessions, len(self._unstarted))):
                group.create_task(self._serve_sessions())
        makespan_s, after = time.perf_counter() - started_at, await self._client.loads()
        num_prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
        num_cached = after.num_cached_prompt_tokens - before.num_cached_prompt_tokens
        return figures(
            makespan_s,
            self._sessions_s,
            self._ttfts_s,
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=num_prompt_tokens - num_cached,
            num_preemptions=after.num_preemptions - before.num_preemptions,
        )

    async def _serve_sessions(self) -> None:
        while self._unstarted:
            started_at = time.perf_counter()
            await self._serve_session(self._unstarted.popleft())
            self._sessions_s.append(time.perf_counter() - started_at)

    async def _serve_session(self, session: int) -> None:
        text = SessionText()
        for request, (prompt, output) in zip(
            self._trace.sessions[session].requests, self._contents[session], strict=True
        ):
            token_ids = text.prompt(prompt)
            await asyncio.sleep(request.think_s)
            text.write(len(prompt), output, await self._serve(token_ids, len(output)))

    async def _serve(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Serve a request and return its token ids. The request must end with all its tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        sent_at, token_ids = time.perf_counter(), list[int]()
        async for output in self._client.stream(None, sampling, prompt_token_ids=prompt):
            if not token_ids:
                self._ttfts_s.append(time.perf_counter() - sent_at)
            token_ids += output.token_ids
        assert len(token_ids) == num_tokens
        return token_ids


def figures(
    makespan_s: float,
    sessions_s: Sequence[float],
    ttfts_s: Sequence[float],
    *,
    num_prompt_tokens: int,
    num_computed_tokens: int,
    num_preemptions: int,
) -> dict[str, float]:
    ttft = summary((seconds, 1) for seconds in ttfts_s)
    assert ttft is not None
    return {
        "makespan_s": makespan_s,
        "mean_session_s": mean(sessions_s) or 0.0,
        **{f"ttft_{key}_s": ttft[key] for key in ("mean", "p50", "p95", "max")},
        "prompt_tokens": num_prompt_tokens,
        "computed_tokens": num_computed_tokens,
        "preemptions": num_preemptions,
    }


def simulate(trace: Trace, policy: str, load: Load, speed: WorkerSpeed) -> dict[str, float]:
    """Simulate a run and return the figures of `TITLES`. Tokens are counted in the same way as on the server."""
    run = Simulation(trace, create_policy(policy), load.settings(speed)).run()
    assert run.stats is not None
    assert not run.num_rejected
    return figures(
        run.ended_at,
        [session.ended_at - session.started_at for session in run.sessions],
        [request.first_token_at - request.arrived_at for request in run.requests],
        num_prompt_tokens=run.stats.num_prompt_tokens,
        num_computed_tokens=run.stats.num_prompt_tokens - run.stats.num_cached_prompt_tokens,
        num_preemptions=run.stats.num_preemptions,
    )


def serve_undisturbed(trace: Trace, policy: str, load: Load, record_to: Path | None = None) -> dict[str, float]:
    """Serve a trace as `serve` does, and repeat the run if other processes used too much of the cores.

    Return the figures of the least disturbed run. If `record_to` is a folder, the steps of that run are recorded to the
    file `recording` in it.
    """
    best: dict[str, float] = {"share_of_others": math.inf}
    for _ in range(MAX_ATTEMPTS):
        flags = [] if record_to is None else ["--record", record_to / "attempt"]
        found = serve(trace, policy, load, flags)
        print(f"other processes used {100 * found['share_of_others']:.1f} % of the cores", flush=True)
        if found["share_of_others"] < best["share_of_others"]:
            best = found
            if record_to is not None:
                (record_to / "attempt").replace(record_to / "recording")
        if best["share_of_others"] <= MAX_SHARE_OF_OTHERS:
            break
    return best


def serve(trace: Trace, policy: str, load: Load, flags: Sequence[object] = ()) -> dict[str, float]:
    """Serve a trace with both services. Return the figures of `TITLES`, and the share of the cores that other processes
    used."""
    worker = ["--num-device-blocks", load.num_blocks, "--block-size", BLOCK_SIZE, "--num-host-blocks", 0]
    limits = ["--max-num-seqs", MAX_NUM_SEQS, "--max-num-batched-tokens", MAX_NUM_BATCHED_TOKENS]
    scheduler = ["--policy", policy, *limits, *flags]

    async def replay(url: str) -> dict[str, float]:
        async with AsyncClient(url) as client:
            await warm_up(client)
            return await Replay(client, trace, load.max_sessions).run()

    cores = Cores()
    with running(MODEL, worker=[*worker, "--num-threads", 1], scheduler=scheduler) as system:
        found = asyncio.run(replay(system.url))
    return found | {"share_of_others": cores.share_of_others()}


async def warm_up(client: AsyncClient) -> None:
    rng, sampling = random.Random("warm-up"), SamplingParams(temperature=0, max_tokens=MAX_OUTPUT, ignore_eos=True)
    for length in (100, 1000, MAX_CONTEXT - MAX_OUTPUT):
        prompt = rng.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=length)
        await asyncio.gather(*(client.complete(None, sampling, prompt_token_ids=prompt) for _ in range(4)))


def calibrate(trace: Trace, load: Load, folder: Path) -> tuple[WorkerSpeed, dict[str, float]]:
    """Fit a modelled worker to the steps of a calibration run. Return its rates and the figures of that run."""
    found = serve_undisturbed(trace, "fcfs", load, record_to=folder)
    steps = read_steps(folder / "recording")
    return fit(steps, MAX_NUM_BATCHED_TOKENS), found | {"steps": len(steps)}


# Traces


def source(arguments: argparse.Namespace) -> Iterator[Session]:
    """Yield the sessions of the trace file, or an endless sequence of random sessions."""
    if arguments.trace is None:
        number = 0
        while True:
            yield random_session(f"{arguments.seed}-{number}", arguments.requests)
            number += 1
    opener: Any = gzip.open if arguments.trace.suffix == ".gz" else open
    with opener(arguments.trace, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def make_traces(arguments: argparse.Namespace, folder: Path) -> tuple[Trace, Trace]:
    """Return the trace to compare, from the first sessions, and the calibration trace, from the following sessions.

    Raises ValueError if there are too few sessions.
    """
    factor, num_compared = arguments.factor, arguments.sessions
    reduction = Reduction(factor, arguments.requests, MAX_CONTEXT, MAX_OUTPUT, MAX_THINK_S / factor)
    sessions = reduce_sessions(source(arguments), reduction, num_compared + arguments.calibration_sessions)
    if len(sessions) <= num_compared:
        raise ValueError(
            f"only {len(sessions)} sessions are short enough, and none is left for the calibration: lower --sessions"
        )
    compared = arguments.keep_trace or folder / "compared.jsonl"
    write_sessions(compared, sessions[:num_compared])
    write_sessions(folder / "calibration.jsonl", sessions[num_compared:])
    return read_trace(compared), read_trace(folder / "calibration.jsonl")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        trace, calibration = make_traces(arguments, Path(name))
        pools = [
            measure_pool(trace, calibration, Load(num_blocks, arguments.at_once), arguments, Path(name))
            for num_blocks in arguments.num_blocks
        ]
    requests = [request for session in trace.sessions for request in session.requests]
    load = {
        "model": "storyteller",
        "trace": "random sessions" if arguments.trace is None else arguments.trace.name,
        "seed": arguments.seed,
        "factor": arguments.factor,
        "sessions": len(trace.sessions),
        "calibration_sessions": len(calibration.sessions),
        "max_sessions": arguments.at_once,
        "requests": len(requests),
        "mean_prompt_tokens": statistics.fmean(request.num_prompt_tokens for request in requests),
        "mean_output_tokens": statistics.fmean(request.num_output_tokens for request in requests),
        "mean_think_s": statistics.fmean(request.think_s for request in requests),
        "needed_tokens": sum(request.num_needed_tokens for request in requests),
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "rounds": arguments.rounds,
    }
    return {"load": load, "pools": pools}


def measure_pool(
    trace: Trace, calibration: Trace, load: Load, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Fit a worker with a pool of this size, then serve and simulate the trace with it under each policy."""
    speed, fitted_to = calibrate(calibration, load, folder)
    print(f"{load.num_blocks} blocks: fitted {speed} to {fitted_to}", flush=True)
    by_policy = {}
    for policy in arguments.policy:
        measured = [serve_undisturbed(trace, policy, load) for _ in range(arguments.rounds)]
        by_policy[policy] = {"measured": measured, "simulated": simulate(trace, policy, load, speed)}
        print(f"{load.num_blocks} blocks, {policy}: {by_policy[policy]}", flush=True)
    return {"num_blocks": load.num_blocks, "calibration": fitted_to, "speed": asdict(speed), "policies": by_policy}


def variant() -> str:
    return compute_with()[0]


def report(found: dict[str, Any]) -> None:
    load = found["load"]
    print(
        f"{load['requests']:,} requests of {load['sessions']} sessions, {load['max_sessions']} at once, prompts of "
        f"{load['mean_prompt_tokens']:,.0f} tokens; medians of {load['rounds']} runs"
    )
    for pool in found["pools"]:
        speed = pool["speed"]
        print(
            f"{pool['num_blocks']} blocks of {load['block_size']}; modelled: {speed['prefill_rate']:,.0f} prompt "
            f"tokens/s, {1000 * speed['step_overhead_s']:.1f} ms a step, {speed['decode_rate']:.0f} tokens/s of a row"
        )
        for policy, entry in pool["policies"].items():
            report_policy(policy, entry)


def report_policy(policy: str, entry: dict[str, Any]) -> None:
    keys = [*TITLES, "share_of_others"]
    medians = {key: statistics.median(run[key] for run in entry["measured"]) for key in keys}
    print(f"  {policy:32} {'measured':>10} {'simulated':>10} {'ratio':>7}")
    for key, title in TITLES.items():
        ours, theirs = medians[key], entry["simulated"][key]
        places = 3 if key.startswith("ttft") else 1 if key.endswith("_s") else 0
        ratio = f"{theirs / ours:7.3f}" if ours else f"{'-':>7}"
        print(f"  {title:32} {ours:10,.{places}f} {theirs:10,.{places}f} {ratio}")
    for what, key, goal in (
        ("computed", "computed_tokens", GOAL_COMPUTED),
        ("makespan", "makespan_s", GOAL_MAKESPAN),
    ):
        error = abs(entry["simulated"][key] / medians[key] - 1)
        print(f"  {what} is off by {100 * error:.1f} % {verdict(100 * error, 100 * goal, at_least=False)}")
    print(f"  other processes used {100 * medians['share_of_others']:.0f} % of the cores during the runs")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="file of agent sessions, plain or .gz (default: random sessions)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random sessions (default: 0)")
    parser.add_argument("--factor", type=int, default=64, help="divide tokens and seconds by this (default: 64)")
    parser.add_argument("--sessions", type=int, default=48, help="sessions to compare (default: 48)")
    parser.add_argument(
        "--calibration-sessions",
        type=int,
        default=48,
        help="sessions for the fit, after the compared ones (default: 48)",
    )
    parser.add_argument("--requests", type=int, default=24, help="maximum number of requests per session (default: 24)")
    parser.add_argument("--at-once", type=int, default=24, help="concurrent sessions (default: 24)")
    parser.add_argument(
        "--num-blocks", type=int, nargs="+", default=[900, 1200], help="blocks of the KV cache (default: 900 1200)"
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["fcfs"], help="policies (default: fcfs)")
    parser.add_argument("--rounds", type=int, default=1, help="measured runs of each policy (default: 1)")
    parser.add_argument("--keep-trace", type=Path, metavar="FILE", help="write the compared trace to this file")
