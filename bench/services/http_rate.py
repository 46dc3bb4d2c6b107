"""Measures streams over HTTP compared with the same streams over gRPC and through smg.

    python -m bench http-rate

The benchmark has three parts:
- Rate: a worker with the 54M shape, a scheduler, a front end with both APIs, and smg in front of the scheduler run as
  processes. In turns, this process reads 32 streams of one kind, for which the CPU time of every process is measured,
  and then some single streams.
- Many: a front end with a simulated worker of 100 ms per step. 1,000 streams of one kind run at a time, and the gaps
  between their messages are measured.
- Parsers: 32 chats with a template whose outputs are parsed for reasoning and tool calls, compared with a template
  whose outputs are not parsed.

HTTP clients are plain sockets, and gRPC clients use grpcio. The raw numbers are written to
bench/results/http_rate.json, and the numbers of a single part to http_rate.PART.json.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from bench.checkpoint import SHAPES, tokenized_checkpoint
from bench.goals import verdict
from bench.measure import cpu_seconds, in_turns
from bench.services.front_end import Child
from bench.services.http_attacks import posted
from bench.tokenizer import trained_tokenizer
from models.story_grammar import write_story
from pagewire.common.process.limits import raise_descriptor_limit
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from testing.router import Router
from testing.services import HOST, Service, running

NUM_STREAMS, NUM_ALONE, OUTPUT_LEN, PROMPT_CHARS = 32, 5, 200, 200
NUM_MANY, MANY_OUTPUT_LEN, MANY_STEP_MS = 1000, 200, 100
STORYTELLER = Path("models/storyteller")  # the scripted worker draws its tokens
GOAL_RATE, GOAL_ADDED_MS, GOAL_GAPS, GOAL_OVER_SMG, GOAL_PARSED = 0.97, 2.0, 1.2, 1.0, 0.98
PARTS = ("rate", "many", "parsers")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_TAGS = "{# <think> </think> <tool_call> #}"
_TOOL = {"type": "function", "function": {"name": "look"}}
# A function that reads one stream of the given number of tokens after a prompt, and returns the arrival time of each
# message.
Read = Callable[[str, int], Awaitable[list[float]]]


def over_http(port: int, model: str, template: str | None = None, **more: Any) -> Read:
    """Return a reader for streams over HTTP. With a template's name it uses chats; `more` are further fields of
    them."""

    async def read(prompt: str, num_tokens: int) -> list[float]:
        asked: dict[str, Any] = {"model": model, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        if template is None:
            path, asked["prompt"] = "/v1/completions", prompt
        else:
            path, messages = "/v1/chat/completions", [{"role": "user", "content": prompt}]
            asked |= {"chat_template": template, "messages": messages, **more}
        reader, writer = await asyncio.open_connection(HOST, port)
        content = json.dumps(asked).encode()
        writer.write(posted(path, content, "content-type: application/json", "connection: close"))
        times = []
        async for line in reader:
            if line.startswith(b"data: {"):
                assert not line.startswith(b'data: {"error"'), line
                times.append(time.perf_counter())
        writer.close()
        return times

    return read


def over_grpc(stub: pb_grpc.SchedulerServiceStub) -> Read:
    async def read(prompt: str, num_tokens: int) -> list[float]:
        sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=prompt, sampling=sampling)
        return [time.perf_counter() async for _ in stub.Generate(request)]

    return read


@contextlib.asynccontextmanager
async def apis(model: Path, scheduler: str, *more_flags: str) -> AsyncIterator[tuple[dict[str, Read], int, int]]:
    """Run a front end, and yield a reader for each of its APIs, its process id, and its HTTP port."""
    port = free_port(HOST)
    flags = ["--model", model, "--scheduler", scheduler, "--port", 0, "--http-port", port, "--metrics-port", 0]
    service = Service("frontend", [*flags, *more_flags, "--log-level", "error"])
    try:
        async with grpc.aio.insecure_channel(service.wait_until_ready()) as channel:
            stub = pb_grpc.SchedulerServiceStub(channel)
            yield {"grpc": over_grpc(stub), "http": over_http(port, model.name)}, service.pid, port
    finally:
        service.stop()


def prompts(rng: random.Random, number: int) -> list[str]:
    """Return texts with different beginnings, so that none has a prefix cache hit on another."""
    return [f"{rng.random()} {write_story(rng)[:PROMPT_CHARS]}" for _ in range(number)]


async def in_rounds(
    arms: dict[str, Read], figures_of: Callable[[Read, random.Random], Awaitable[dict[str, float]]], num_rounds: int
) -> dict[str, list[dict[str, float]]]:
    rng = random.Random(0)
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for index, arm in in_turns(list(arms), num_rounds):
        figures = await figures_of(arms[arm], rng)
        print(f"  round {index} {arm}: {figures}", flush=True)
        if index > 0:
            rounds[arm].append(figures)
    return rounds


async def rates(model: Path, num_rounds: int, num_alone: int) -> dict[str, list[dict[str, float]]]:
    with (
        running(model, worker=["--num-device-blocks", 4096, "--num-threads", 1]) as system,
        Router([system.url], "--policy=round_robin") as smg,
    ):
        async with apis(model, system.url) as (arms, front_end, _):
            processes = {"client": os.getpid(), "front_end": front_end, "smg": smg.pid}
            processes |= {"scheduler": system.scheduler.pid, "worker": system.worker.pid}
            arms["smg"] = over_http(smg.port, model.name)
            return await in_rounds(arms, partial(rate, processes, num_alone), num_rounds)


async def parser_rates(model: Path, num_rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measure chats with and without parsers. Adds two chat templates to `model`."""
    templates = model / "additional_chat_templates"
    templates.mkdir()
    for name, tags in (("content", ""), ("parsed", _TAGS)):
        (templates / f"{name}.jinja").write_text(_TEMPLATE + tags)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    with running(model, worker=["--num-device-blocks", 4096, "--num-threads", 1]) as system:
        # A grammar for tool calls would end these outputs early.
        async with apis(model, system.url, "--no-strict-tools") as (_, front_end, port):
            arms = {
                "content": over_http(port, model.name, "content"),
                "parsed": over_http(port, model.name, "parsed", tools=[_TOOL]),
            }
            return await in_rounds(arms, partial(rate, {"front_end": front_end}, NUM_ALONE), num_rounds)


async def rate(processes: Mapping[str, int], num_alone: int, read: Read, rng: random.Random) -> dict[str, float]:
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    start = time.perf_counter()
    together = await asyncio.gather(*(read(prompt, OUTPUT_LEN) for prompt in prompts(rng, NUM_STREAMS)))
    seconds = time.perf_counter() - start
    taken = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    num_tokens = NUM_STREAMS * OUTPUT_LEN
    assert all(together)
    alone = []
    for prompt in prompts(rng, num_alone):
        asked_at = time.perf_counter()
        alone.append((await read(prompt, 2))[0] - asked_at)
    return {
        "tokens_per_s": num_tokens / seconds,
        **{f"{name}_us_per_token": 1e6 * each / num_tokens for name, each in taken.items()},
        "first_ms_together": 1e3 * statistics.median(times[0] - start for times in together),
        "first_ms_alone": 1e3 * statistics.median(alone),
    }


async def many_gaps(model: Path, num_rounds: int) -> dict[str, list[dict[str, float]]]:
    worker = Child("bench.services.scripted_worker", str(model), "--step-ms", str(MANY_STEP_MS))
    flags = ["--model", model, "--worker", worker.address, "--port", 0, "--metrics-port", 0, "--log-level", "error"]
    scheduler = Service("scheduler", [*flags, "--max-num-seqs", NUM_MANY])
    try:
        async with apis(model, scheduler.wait_until_ready()) as (arms, _, _):
            return await in_rounds(arms, gaps, num_rounds)
    finally:
        scheduler.stop()
        worker.stop()


async def gaps(read: Read, rng: random.Random) -> dict[str, float]:
    """Return quantiles of the milliseconds between messages, while all streams are open and none begins or ends."""
    asked = prompts(rng, NUM_MANY)
    streams = await asyncio.gather(*(read(prompt, MANY_OUTPUT_LEN) for prompt in asked))
    begun, ends = max(times[0] for times in streams), min(times[-1] for times in streams)
    found = sorted(
        after - before
        for times in streams
        for before, after in itertools.pairwise(times)
        if begun <= before and after <= ends
    )
    assert found, "the streams were never all open at the same time"
    quantiles = {"p50": found[len(found) // 2], "p99": found[len(found) * 99 // 100], "max": found[-1]}
    return {name: 1e3 * seconds for name, seconds in quantiles.items()} | {"gaps": len(found)}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as made:
        # Every token of this tokenizer is text, so that every token results in a message in all arms.
        model = tokenized_checkpoint("54M", trained_tokenizer(SHAPES["54M"]["vocab_size"]), Path(made) / "model")
        figures: dict[str, Any] = {"load": {"model": "54M", "rounds": arguments.rounds}}
        if arguments.only in "rate":
            figures["rate"] = await rates(model, arguments.rounds, arguments.alone)
        if arguments.only in "many":
            figures["many"] = await many_gaps(STORYTELLER, arguments.rounds)
        if arguments.only in "parsers":
            figures["parsers"] = await parser_rates(model, arguments.rounds)
    return figures


def ratio(rounds: dict[str, list[dict[str, float]]], figure: str, arm: str, base: str) -> float:
    """Return the median over the rounds of the ratio of a figure in `arm` to the same figure in `base`."""
    return statistics.median(
        mine[figure] / others[figure] for mine, others in zip(rounds[arm], rounds[base], strict=True)
    )


def line(of_arm: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{name} {statistics.median(each[name] for each in of_arm):,.1f}" for name in of_arm[0])


def report(figures: dict[str, Any]) -> None:
    for part in PARTS:
        for arm, of_arm in figures.get(part, {}).items():
            print(f"  {part} {arm}: {line(of_arm)}")
    if rounds := figures.get("rate"):
        over_grpc, over_smg = (ratio(rounds, "tokens_per_s", "http", base) for base in ("grpc", "smg"))
        print(f"{NUM_STREAMS} streams, tokens a second over HTTP: {over_grpc:.3f} of gRPC's", end=" ")
        print(verdict(over_grpc, GOAL_RATE, at_least=True), end="; ")
        print(f"{over_smg:.3f} of smg's {verdict(over_smg, GOAL_OVER_SMG, at_least=True)}")
        for figure in ("first_ms_alone", "first_ms_together"):
            added = statistics.median(
                mine[figure] - others[figure] for mine, others in zip(rounds["http"], rounds["grpc"], strict=True)
            )
            print(f"  {figure}: {added:+.2f} ms {verdict(added, GOAL_ADDED_MS, at_least=False)}")
    if rounds := figures.get("many"):
        wider = ratio(rounds, "p99", "http", "grpc")
        print(f"{NUM_MANY} streams, p99 of the gaps: {wider:.2f} of gRPC's {verdict(wider, GOAL_GAPS, at_least=False)}")
    if rounds := figures.get("parsers"):
        parsed = ratio(rounds, "tokens_per_s", "parsed", "content")
        print(f"{NUM_STREAMS} chats, tokens a second with parsers: {parsed:.3f}", end=" ")
        print(f"of those without {verdict(parsed, GOAL_PARSED, at_least=True)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each arm (default: 5)")
    parser.add_argument("--alone", type=int, default=NUM_ALONE, help="streams alone in a round (default: %(default)s)")
    parser.add_argument("--only", default="", choices=("", *PARTS), help="one part (default: all)")
