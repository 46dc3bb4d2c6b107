"""Measures the cost of the split: the same scheduler and worker as two processes over gRPC and as one process.

    python -m bench split

Load is injected into the step loop, below the client API, so that both arms do the same work except for the wire
protocol. Arms run in turns, each in its own processes, which live through all rounds. Figures are medians. A third arm
serves real clients with the two processes. The scheduler's additional CPU time relative to the second arm is the cost
of delivering a token to a client's stream. The raw numbers are written to bench/results/split.json.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.measure import cpu_seconds, in_turns, medians
from bench.services.end_counter import EndCounter, while_running
from pagewire.cli import GRPC_EXPERIMENTS

ARMS = ("one process", "two processes", "two processes and clients")
VOCAB_SIZE = 32000


def prompts(arguments: argparse.Namespace, round_index: int) -> list[tuple[int, ...]]:
    rng = random.Random(round_index)
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(arguments.input_len)) for _ in range(arguments.num_seqs)]


# The arms. Each runs in a child process that answers lines of "round N" with one JSON line.


class LocalLink:
    """A link to a worker in this process. Plans go to its compute thread, and results return to the event loop.

    Attributes:
        failed: receives an exception that a result raised. It never has a result itself.
    """

    def __init__(self, events, engine) -> None:
        from worker_service.engine import EngineSession

        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._events = events
        self._engine = engine
        self._session = EngineSession(lambda outcome: self._loop.call_soon_threadsafe(self._take, outcome))

    async def begin(self) -> None:
        begun = asyncio.Event()
        self._engine.begin(self._session, 1, lambda: self._loop.call_soon_threadsafe(begun.set))
        await begun.wait()
        self._events.worker_ready(self._engine.ready, 1, self)

    def send(self, plan) -> None:
        self._engine.submit(self._session, plan)

    def close(self, reason: str) -> None:
        raise RuntimeError(reason)

    def _take(self, outcome) -> None:
        try:
            self._pass_on(outcome)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    def _pass_on(self, outcome) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        self._events.result(outcome)


@asynccontextmanager
async def one_process(arguments, step_loop) -> AsyncIterator[asyncio.Future]:
    """Run a worker in this process, and yield a future that fails if the worker fails."""
    from worker_service.config import WorkerConfig
    from worker_service.engine import Engine
    from worker_service.server import limit_spinning

    limit_spinning(os.environ)
    from worker_service.startup.loader import load_worker

    config = WorkerConfig(model=str(arguments.model), num_device_blocks=4096)
    engine = Engine(lambda: load_worker(config, "bench"))
    loop, loaded = asyncio.get_running_loop(), asyncio.Event()
    failures: list[Exception | None] = []
    engine.start(lambda error: (failures.append(error), loop.call_soon_threadsafe(loaded.set)))
    await loaded.wait()
    if failures[0] is not None:
        raise failures[0]
    link = LocalLink(step_loop.exchange, engine)
    try:
        await link.begin()
        yield link.failed
    finally:
        engine.stop(60)


@asynccontextmanager
async def worker_process(arguments) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "pagewire", "worker", "--model", str(arguments.model), "--port", "0"]
    command += ["--num-device-blocks", "4096", "--log-level", "warning"]
    async with service_process(*command) as (url, _):
        yield url.removeprefix("grpc://")


@asynccontextmanager
async def service_process(*command: str) -> AsyncIterator[tuple[str, int]]:
    """Run a command, and yield the URL that it prints and its process id. Raises RuntimeError if it ends without a
    URL."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("ready on "):
            raise RuntimeError(f"{' '.join(command)} ended with {await process.wait()} and printed {line!r}")
        yield line.removeprefix("ready on "), process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def two_processes(arguments, step_loop) -> AsyncIterator[asyncio.Future]:
    """Run a worker as a process, and yield a task that ends if the link to the worker fails."""
    from pagewire.common.wire.transport.dialling import Dialler
    from scheduler_service.links.worker.worker_link import CHANNEL_OPTIONS, WorkerLink
    from scheduler_service.serving.checkpoint.model_info import read_model_info

    info = read_model_info(str(arguments.model))
    async with worker_process(arguments) as target:
        dialler = Dialler(target, CHANNEL_OPTIONS)
        link = WorkerLink(
            [dialler], step_loop.exchange, instance_id="bench", model_digest=info.digest, pipeline_depth=2
        )
        running = asyncio.create_task(link.run())
        try:
            await while_running(step_loop.availability.wait_for_first_worker(), running)
            yield running
        finally:
            running.cancel()
            await dialler.close()


async def run_injected(arguments, arm) -> None:
    from pagewire.common.wire.messages import SamplingParams
    from scheduler_service.core.request import Request
    from scheduler_service.core.scheduler import Scheduler
    from scheduler_service.core.scheduler_options import SchedulerOptions
    from scheduler_service.serving.step_loop import StepLoop

    scheduler = Scheduler(SchedulerOptions(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096))
    step_loop = StepLoop(scheduler, [], worker_timeout=60)
    stepping = asyncio.create_task(step_loop.run())
    async with (one_process if arm == ARMS[0] else two_processes)(arguments, step_loop) as linked:

        async def round_of(index: int) -> None:
            counter = EndCounter(step_loop, arguments.num_seqs)
            for i, prompt in enumerate(prompts(arguments, index)):
                counter.submit(Request(f"{index}-{i}", "", prompt, SamplingParams(), arguments.output_len))
            await while_running(counter.wait(), linked, stepping)

        await answer_rounds(arguments, round_of, own_cpu_seconds)
    stepping.cancel()


async def run_clients(arguments) -> None:
    from pagewire import AsyncClient, SamplingParams

    async with worker_process(arguments) as target:
        command = [sys.executable, "-m", "pagewire", "scheduler", "--worker", target, "--model", str(arguments.model)]
        command += ["--port", "0", "--metrics-port", "0", "--log-level", "warning"]
        async with service_process(*command) as (url, pid):
            sampling = SamplingParams(temperature=0, max_tokens=arguments.output_len, ignore_eos=True)
            async with AsyncClient(url) as client:

                async def round_of(index: int) -> None:
                    requests = [
                        client.complete(None, sampling, prompt_token_ids=list(prompt))
                        for prompt in prompts(arguments, index)
                    ]
                    for completion in await asyncio.gather(*requests):
                        assert completion.usage.completion_tokens == arguments.output_len

                await answer_rounds(arguments, round_of, lambda: cpu_seconds(pid))


async def answer_rounds(arguments, round_of, read_cpu_seconds) -> None:
    """Read round numbers from standard input, and print the throughput and the scheduler's CPU time per token."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        cpu, start = read_cpu_seconds(), time.perf_counter()
        await round_of(int(line))
        seconds, cpu = time.perf_counter() - start, read_cpu_seconds() - cpu
        num_tokens = arguments.num_seqs * arguments.output_len
        print(
            json.dumps({"tokens_per_s": num_tokens / seconds, "cpu_us_per_token": cpu / num_tokens * 1e6}), flush=True
        )


def own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# The parent process: runs the arms in turns and reports.


class Arm:
    """A process that runs the rounds of an arm. Its methods raise SystemExit if the process fails."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name = name
        self.rounds: list[dict[str, float]] = []
        command = [sys.executable, "-m", "bench", "split", "--arm", name, "--model", str(arguments.model)]
        for flag in ("num_seqs", "input_len", "output_len"):
            command += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        line = self._read().strip()
        if line != "ready":
            raise SystemExit(f"{self.name}: {line!r}")

    def round(self, index: int) -> dict[str, float]:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which reading reports
            print(index, file=self._process.stdin, flush=True)
        return json.loads(self._read())

    def close(self) -> None:
        """End the process by closing its input. Kill it after a minute."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}")
        return line


def measure(arguments: argparse.Namespace) -> dict | None:
    # for the arms' processes, as the command `pagewire` sets it
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    if arguments.arm is not None:
        asyncio.run(run_clients(arguments) if arguments.arm == ARMS[2] else run_injected(arguments, arguments.arm))
        return None
    from bench.checkpoint import random_checkpoint
    from bench.core import plan

    arguments.model = random_checkpoint("54M")
    return {**measure_arms(arguments), "plan": plan.measure()}


def measure_arms(arguments: argparse.Namespace) -> dict:
    arms: list[Arm] = []
    with contextlib.ExitStack() as stack:
        for name in ARMS:
            arms.append(Arm(name, arguments))
            stack.callback(arms[-1].close)
            arms[-1].wait_until_ready()
        for index, arm in in_turns(arms, arguments.rounds):
            figures = arm.round(index * len(arms) + arms.index(arm))
            print(f"round {index} {arm.name}: {figures['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
            if index > 0:
                arm.rounds.append(figures)
    rounds = {arm.name: arm.rounds for arm in arms}
    median = medians(rounds)
    one, two, clients = (median[name] for name in ARMS)
    paired = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(arms[0].rounds, arms[1].rounds, strict=True)]
    return {
        "load": {key: getattr(arguments, key) for key in ("num_seqs", "input_len", "output_len", "rounds")},
        "median": median,
        "split_ratio": two["tokens_per_s"] / one["tokens_per_s"],
        "split_ratio_of_pairs": statistics.median(paired),
        "delivery_cpu_us_per_token": clients["cpu_us_per_token"] - two["cpu_us_per_token"],
        "rounds": rounds,
    }


def report(figures: dict) -> None:
    load = figures["load"]
    print(f"{load['num_seqs']} sequences, {load['input_len']} tokens in, {load['output_len']} out, 54M Qwen3 shape")
    for name, median in figures["median"].items():
        print(f"  {name:28s} {median['tokens_per_s']:8.0f} tokens/s   {median['cpu_us_per_token']:7.0f} us CPU/token")
    ratio, paired = figures["split_ratio"], figures["split_ratio_of_pairs"]
    print(f"  two processes / one process  {ratio:8.3f}   (median of pairs {paired:.3f})")
    print(f"  delivering a token to a client stream costs {figures['delivery_cpu_us_per_token']:.0f} us of CPU")
    steady = figures["plan"]
    print(
        f"  a plan for {steady['num_sequences']} sequences that only decode: at most {steady['max_bytes']} bytes, "
        f"{steady['encode_us']:.0f} us to encode, {steady['decode_us']:.0f} us to decode"
    )
    print("CPU/token is the CPU time of the scheduling process; with one process, it includes the model.")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=int, default=16, help="sequences at a time (default: 16)")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: 128)")
    parser.add_argument("--rounds", type=int, default=11, help="measured rounds of each arm (default: 11)")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
