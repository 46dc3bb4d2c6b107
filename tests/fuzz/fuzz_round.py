"""A round: requests and services drawn from a seed, and the outputs of each request alone and beside the others."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pagewire import AsyncClient
from pagewire.client.errors import PagewireError
from pagewire.hosting.supervisor import free_port
from testing.forked import LoggingStart
from testing.services import HOST, Service, Start, System, running
from testing.serving.over_http import as_over_http
from testing.serving.received import Received
from tests.fuzz.company import Company, outputs_of
from tests.fuzz.drawn_request import VOCAB_SIZE, DrawnRequest, Way, draw_requests

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
FLOAT32 = ["--dtype", "float32", "--log-level", "error"]
CALM = {"worker": [*FLOAT32, "--num-threads", 1], "scheduler": ["--no-enable-prefix-caching", "--pipeline-depth", 1]}
END = 0  # the tokenizer's end token
REST_S = 60.0  # seconds within which a server must become idle once its clients have gone
NUM_AGAIN = 3  # requests that are repeated at the end


@dataclass(slots=True)
class Report:
    """The findings of rounds, and counts of the tried cases."""

    seed: int
    num_rounds: int = 0
    num_requests: int = 0
    num_over_http: int = 0
    num_interrupted: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_spelled: int = 0
    faults: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Report") -> "Report":
        for each in fields(Report):
            if each.name != "seed":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_over_http} of them over HTTP, {self.num_interrupted} interrupted "
            f"and {self.num_refused} refused, {self.num_tokens} tokens, {self.num_preemptions} preemptions, "
            f"{self.num_cached_tokens} tokens of prompts from the cache; {self.num_spelled} texts spelled; "
            f"{len(self.faults)} faults"
        )


def draw_model(seed: int, folder: Path) -> Path:
    """Return the bundled model, or a random model with its tokenizer and either a sliding window or experts."""
    family = random.Random(f"model {seed}").choice(("bundled", "mistral", "qwen2_moe"))
    if family == "bundled":
        return STORYTELLER
    from testing.checkpoints.families import make_checkpoint  # with torch, like the services

    path = make_checkpoint(folder / family, family, seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORYTELLER / name, path / name)
    return path


def draw_flags(rng: random.Random) -> dict[str, list[Any]]:
    """Return flags for services with a small cache, small steps, and every feature that moves blocks."""
    block_size = rng.choice((4, 8, 16))
    worker = [*FLOAT32, "--block-size", block_size, "--num-device-blocks", rng.choice((448, 640)) // block_size]
    worker += ["--num-host-blocks", rng.choice((0, 400, 4000)) // block_size, "--num-threads", rng.choice((1, 2))]
    worker += ["--max-num-seqs", rng.choice((8, 16, 32)), "--max-num-batched-tokens", rng.choice((16, 48, 100, 512))]
    scheduler = ["--preemption", rng.choice(("swap", "recompute", "auto")), "--pipeline-depth", rng.choice((1, 2, 3))]
    scheduler += [
        "--policy",
        rng.choice(("agent", "priority", "fcfs", "fair", "deadline")),
        "--watermark",
        rng.choice((0, 0.05)),
    ]
    return {"worker": worker, "scheduler": scheduler}


async def run_round(seed: int, num_requests: int) -> Report:
    """Run the round of a seed and return its report.

    All rounds of a process must use one event loop: gRPC may call into the loop of an earlier round, which must not be
    closed.
    """
    rng, report = random.Random(seed), Report(seed, 1, num_requests)
    flags, requests = draw_flags(rng), draw_requests(rng, num_requests)
    num_at_once = rng.choice((12, 40))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: report.faults.append(f"asyncio: {context}"))
    with tempfile.TemporaryDirectory() as folder:
        model, start = draw_model(seed, Path(folder)), LoggingStart(Path(folder))
        with running(model, start=start, **CALM) as calm:
            alone = await _alone(calm.url, requests)
        with running(model, start=start, **flags) as system, _front_end(model, system, start) as http_url:
            await _together(system, http_url, requests, num_at_once, alone, report)
        report.faults += [f"logged: {line}" for line in start.lines()]
    loop.set_exception_handler(None)
    return report


@contextmanager
def _front_end(model: Path, system: System, start: Start) -> Iterator[str]:
    """Run a front end; yield the URL of its HTTP API."""
    port = free_port(HOST)
    flags = ["--model", model, "--scheduler", system.url, "--port", 0, "--http-port", port, "--metrics-port", 0]
    front_end = Service("frontend", [*flags, "--log-level", "error"], start)
    try:
        front_end.wait_until_ready()
        yield f"http://{HOST}:{port}"
    finally:
        front_end.stop()


async def _alone(url: str, requests: Sequence[DrawnRequest]) -> list[Received]:
    async with AsyncClient(url) as client:
        return [await _receive(client, request) for request in requests]


async def _receive(client: AsyncClient, request: DrawnRequest) -> Received:
    received = Received()
    try:
        async for output in outputs_of(client, request):
            received.add(output)
    except PagewireError as error:
        received.fail(error)
    return received


async def _together(
    system: System,
    http_url: str,
    requests: Sequence[DrawnRequest],
    num_at_once: int,
    alone: Sequence[Received],
    report: Report,
) -> None:
    """Send all requests at once, and report differing outputs."""
    company = Company(system.url, http_url, requests, num_at_once)
    await company.run()
    report.num_over_http = sum(request.way is not Way.GRPC for request in requests)
    report.num_interrupted = sum(company.is_interrupted)
    report.num_refused = sum(received.error is not None for received in alone)
    report.num_tokens = sum(received.num_tokens for received in company.received)
    for number, (calm, wild) in enumerate(zip(alone, company.received, strict=True)):
        if requests[number].way is not Way.GRPC:
            calm = as_over_http(calm, requests[number].arguments)
        if not (wild.begins(calm) if company.is_interrupted[number] else wild == calm):
            report.faults.append(_difference(number, requests[number], calm, wild))
    async with AsyncClient(system.url) as client:
        await _rest(client, report)
        for number in range(min(NUM_AGAIN, len(requests))):
            again = await _receive(client, requests[number])
            if again != alone[number]:
                report.faults.append("again, " + _difference(number, requests[number], alone[number], again))


async def _rest(client: AsyncClient, report: Report) -> None:
    """Wait until no request runs, waits or owns blocks."""
    try:
        async with asyncio.timeout(REST_S):
            while True:
                loads = await client.loads()
                gauges = {
                    "running": loads.num_running,
                    "waiting": loads.num_waiting,
                    "swapped": loads.num_swapped,
                    "held blocks": loads.num_held_blocks,
                    "held host blocks": loads.num_held_host_blocks,
                }
                if not any(gauges.values()):
                    break
                await asyncio.sleep(0.02)  # the server is another process
    except TimeoutError:
        report.faults.append(f"the server does not come to rest: {gauges}")
    if loads.num_worker_losses:
        report.faults.append(f"the worker was lost {loads.num_worker_losses} times")
    report.num_preemptions, report.num_cached_tokens = loads.num_preemptions, loads.num_cached_prompt_tokens


def _difference(number: int, request: DrawnRequest, calm: Received, wild: Received) -> str:
    return f"request {number} differs: {request}\n    alone: {calm}\n    in company: {wild}"
