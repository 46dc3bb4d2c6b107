"""Measures the scheduler's CPU time for delivering a token to clients, with a simulated worker of 4 ms per step.

    python -m bench front-end

Arms run in turns, and figures are medians. `steps` is the step loop without receivers. The additional cost of an arm
with the same number of streams is the cost of delivery. `bare` is a gRPC server that only sends prepared messages with
the same tokens at the same pace. It is the lower bound for these streams in Python. In the GenerateMany arms, front
ends receive token ids only, over 16 connections. `idle` has 1,000 additional GenerateMany RPCs that are open and
unused. The raw numbers are written to bench/results/front_end.json.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio

from bench.goals import verdict
from bench.measure import cpu_seconds, in_turns
from bench.services.end_counter import EndCounter, while_running
from pagewire.cli import GRPC_EXPERIMENTS
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

MODEL = "models/storyteller"
PROMPT = tuple(range(300, 332))
GENERATE_STREAMS, GENERATE_GOAL_US = 32, 35.0
MANY_STREAMS, MANY_CONNECTIONS, MANY_GOAL_US = 256, 16, 3.0
NUM_IDLE_CALLS = 1000
# Each channel gets its own connection.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True, slots=True)
class Round:
    """The CPU time per token in the delivering process, and the duration of a step, averaged over a round."""

    cpu_us_per_token: float
    step_ms: float


class Child:
    """A process that prints "ready on ADDRESS" and then answers each input line with one line."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline()
        if not line.startswith("ready on "):
            raise SystemExit(f"{' '.join(arguments)} ended with {self._process.wait()} and printed {line!r}")
        self.address = line.strip().removeprefix("ready on ").removeprefix("grpc://")

    def ask(self, line: str) -> str:
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


# Loads: each receives a child process and returns when all tokens have arrived.


async def injected(child: Child, num_streams: int, num_tokens: int) -> None:
    """Submit the requests directly to the child's step loop."""
    answer = await asyncio.to_thread(child.ask, f"{num_streams} {num_tokens}")
    assert answer == "done\n", answer


async def generate(child: Child, num_streams: int, num_tokens: int) -> None:
    """Run streams of text, all on one connection."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    async def read(stub: pb_grpc.SchedulerServiceStub) -> int:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
        return sum([len(response.token_ids) async for response in stub.Generate(request)])

    async with grpc.aio.insecure_channel(child.address) as channel:
        stub = pb_grpc.SchedulerServiceStub(channel)
        counts = await asyncio.gather(*(read(stub) for _ in range(num_streams)))
    assert counts == [num_tokens] * num_streams


async def generate_many_texts(child: Child, num_streams: int, num_tokens: int) -> None:
    """Run streams of text that share one RPC, like the streams of one client."""
    await generate_many(child, num_streams, num_tokens, num_connections=1, token_only=False)


async def generate_many(
    child: Child,
    num_streams: int,
    num_tokens: int,
    *,
    num_connections: int = MANY_CONNECTIONS,
    token_only: bool = True,
) -> None:
    """Run streams of token ids only, spread over several connections."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    num_per_connection = num_streams // num_connections

    async def read() -> int:
        async with grpc.aio.insecure_channel(child.address, OWN_CONNECTION) as channel:
            call = pb_grpc.SchedulerServiceStub(channel).GenerateMany()
            for stream_id in range(num_per_connection):
                submission = pb.Submission(stream_id=stream_id, request=request, token_only=token_only)
                await call.write(pb.GenerateManyRequest(submit=submission))
            await call.done_writing()
            num_read = 0
            async for message in call:
                num_read += len(message.token_ids) + sum(len(entry.delta.token_ids) for entry in message.deltas)
            return num_read

    counts = await asyncio.gather(*(read() for _ in range(num_connections)))
    assert counts == [num_tokens * num_per_connection] * num_connections


@asynccontextmanager
async def idle_calls(child: Child) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(child.address, OWN_CONNECTION) as channel:
        calls = [pb_grpc.SchedulerServiceStub(channel).GenerateMany() for _ in range(NUM_IDLE_CALLS)]
        for call in calls:
            await call.read()
        yield
        for call in calls:
            call.cancel()


Load = Callable[[Child, int, int], Awaitable[None]]


@dataclass(slots=True)
class Arm:
    name: str
    child: Child
    load: Load
    num_streams: int
    rounds: list[Round] = field(default_factory=list)
    beside: Callable[[Child], AbstractAsyncContextManager[None]] = lambda child: nullcontext()

    async def round(self, num_tokens: int) -> None:
        async with self.beside(self.child):
            cpu, start = self.child.cpu_seconds(), time.perf_counter()
            await self.load(self.child, self.num_streams, num_tokens)
            seconds, cpu = time.perf_counter() - start, self.child.cpu_seconds() - cpu
        self.rounds.append(Round(cpu / (self.num_streams * num_tokens) * 1e6, seconds / num_tokens * 1e3))

    def median(self) -> Round:
        columns = zip(*((each.cpu_us_per_token, each.step_ms) for each in self.rounds), strict=True)
        return Round(*map(statistics.median, columns))


# The child processes.


async def run_steps(worker: str) -> None:
    """Run a step loop that receives its requests as lines of "streams tokens" on standard input."""
    from pagewire.common.wire.messages import SamplingParams
    from pagewire.common.wire.transport.dialling import Dialler
    from scheduler_service.core.request import Request
    from scheduler_service.core.scheduler import Scheduler
    from scheduler_service.core.scheduler_options import SchedulerOptions
    from scheduler_service.links.worker.worker_link import CHANNEL_OPTIONS, WorkerLink
    from scheduler_service.metrics import Metrics
    from scheduler_service.serving.checkpoint.model_info import read_model_info
    from scheduler_service.serving.step_loop import StepLoop

    scheduler = Scheduler(SchedulerOptions(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048))
    step_loop = StepLoop(scheduler, [Metrics()], worker_timeout=60)
    digest = read_model_info(MODEL).digest
    dialler = Dialler(worker, CHANNEL_OPTIONS)
    link = WorkerLink([dialler], step_loop.exchange, instance_id="bench", model_digest=digest, pipeline_depth=2)
    running = [asyncio.create_task(each) for each in (link.run(), step_loop.run())]
    await while_running(step_loop.availability.wait_for_first_worker(), *running)
    print("ready on -", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        num_streams, num_tokens = map(int, line.split())
        counter = EndCounter(step_loop, num_streams)
        for i in range(num_streams):
            counter.submit(Request(str(i), "", PROMPT, SamplingParams(), num_tokens))
        await while_running(counter.wait(), *running)
        print("done", flush=True)
    for task in running:
        task.cancel()
    await dialler.close()


class BareServer(pb_grpc.SchedulerServiceServicer):
    """A server that sends `max_tokens` messages to every client, one per step, with a token for each of the client's
    streams."""

    def __init__(self) -> None:
        self.step = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        message = pb.GenerateResponse(request_id="req-0123456789abcdef", first_token=500, token_ids=[500], text=" word")
        for _ in range(request.sampling.max_tokens):
            await self.step.wait()
            await context.write(message)

    async def GenerateMany(self, requests, context: grpc.aio.ServicerContext) -> None:
        submissions = [message.submit async for message in requests]
        message = pb.GenerateManyResponse(
            stream_ids=[submission.stream_id for submission in submissions], token_ids=[500] * len(submissions)
        )
        for _ in range(submissions[0].request.sampling.max_tokens):
            await self.step.wait()
            await context.write(message)


async def run_bare(step_s: float) -> None:
    server, servicer = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), BareServer()
    pb_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    while True:
        await asyncio.sleep(step_s)
        servicer.step.set()
        servicer.step = asyncio.Event()


# The parent process: runs the arms in turns and reports.


async def measure(arguments: argparse.Namespace) -> dict | None:
    # for the arms' processes, as the command `pagewire` sets it
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    if arguments.steps is not None:
        return await run_steps(arguments.steps)
    if arguments.bare:
        return await run_bare(arguments.step_ms / 1000)
    worker_command = ("bench.services.scripted_worker", MODEL, "--step-ms", str(arguments.step_ms))
    scheduler_flags = ("--model", MODEL, "--port", "0", "--metrics-port", "0", "--log-level", "warning")
    children = [Child(*worker_command), Child(*worker_command)]
    try:
        children.append(Child("bench", "front_end", "--steps", children[0].address))
        children.append(Child("pagewire", "scheduler", "--worker", children[1].address, *scheduler_flags))
        children.append(Child("bench", "front_end", "--bare", "--step-ms", str(arguments.step_ms)))
        _, _, steps, scheduler, bare = children
        arms = [
            Arm("steps", steps, injected, GENERATE_STREAMS),
            Arm("Generate", scheduler, generate, GENERATE_STREAMS),
            Arm("bare streams", bare, generate, GENERATE_STREAMS),
            Arm("GenerateMany of text", scheduler, generate_many_texts, GENERATE_STREAMS),
            Arm("steps of 256", steps, injected, MANY_STREAMS),
            Arm("GenerateMany", scheduler, generate_many, MANY_STREAMS),
            Arm("GenerateMany beside idle", scheduler, generate_many, MANY_STREAMS, beside=idle_calls),
            Arm("bare calls", bare, generate_many, MANY_STREAMS),
        ]
        for index, arm in in_turns(arms, arguments.rounds, num_warm_ups=0):
            await arm.round(arguments.output_len)
            print(f"round {index} {arm.name}: {arm.rounds[-1].cpu_us_per_token:.1f} us", file=sys.stderr)
    finally:
        for child in children:
            child.stop()
    return {
        "load": {key: getattr(arguments, key) for key in ("step_ms", "output_len", "rounds")},
        "arms": [
            {
                "name": arm.name,
                "num_streams": arm.num_streams,
                "median": asdict(arm.median()),
                "rounds": [asdict(each) for each in arm.rounds],
            }
            for arm in arms
        ],
    }


def report(figures: dict) -> None:
    load = figures["load"]
    print(f"CPU time of the delivering process, us per token; steps of {load['step_ms']:g} ms")
    cost = {}
    for arm in figures["arms"]:
        median = arm["median"]
        cost[arm["name"]] = median["cpu_us_per_token"]
        print(
            f"  {arm['name']:24s} {arm['num_streams']:4d} streams {median['cpu_us_per_token']:8.2f}   "
            f"{median['step_ms']:6.2f} ms a step"
        )
    for name, steps, bare, goal_us in (
        ("Generate", "steps", "bare streams", GENERATE_GOAL_US),
        ("GenerateMany of text", "steps", None, GENERATE_GOAL_US),
        ("GenerateMany", "steps of 256", "bare calls", MANY_GOAL_US),
    ):
        delivery = cost[name] - cost[steps]
        print(f"  delivery by {name:20s} {delivery:8.2f} {verdict(delivery, goal_us, at_least=False)}")
        if bare is not None:
            print(f"    bare messages alone            {cost[bare]:8.2f}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-ms", type=float, default=4.0, help="duration of a step (default: 4)")
    parser.add_argument("--output-len", type=int, default=1000, help="tokens of each stream (default: 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each arm (default: 5)")
    parser.add_argument("--steps", metavar="WORKER", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
