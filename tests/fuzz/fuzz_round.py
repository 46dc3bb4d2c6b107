"""A round: requests and services drawn from a seed, and the outputs of each request alone and beside the others."""

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagewire import AsyncClient
from pagewire.client.errors import PagewireError
from pagewire.hosting.supervisor import free_port
from testing.forked import LoggingStart
from testing.services import HOST, Service, Start, System, running
from testing.serving.over_http import as_over_http
from testing.serving.received import Received, Sample
from tests.fuzz.company import Company, outputs_of
from tests.fuzz.drawn_request import VOCAB_SIZE, DrawnRequest, Way, draw_requests, draw_turns, lengthened
from tests.fuzz.killer import Killer
from tests.fuzz.memory import CacheShape, Lengths
from tests.fuzz.report import Report
from tests.fuzz.setting import WEIGHTS, Setting

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
QUIET = ["--log-level", "error"]
CALM = {
    "worker": [*QUIET, "--num-threads", 1],
    "scheduler": ["--no-enable-prefix-caching", "--pipeline-depth", 1, "--max-lease-ms", 0],
}
END = 0  # the tokenizer's end token
REST_S = 60.0  # seconds within which a server must become idle once its clients have gone
FAMILIES = ("bundled", "mistral", "qwen2_moe")
DEFAULT = Setting()
MAX_AT_ONCE = 16  # requests in flight of a tight round, so few that all of them run if there is memory
MAX_ROWS = 64  # of a worker with a pool of a computed size
MAX_IDLE_RUNS = 3  # runs of all requests during which no moment for a kill was found
NUM_AGAIN = 3  # requests that are repeated at the end


def draw_model(seed: int, folder: Path, families: Sequence[str]) -> Path:
    """Return the bundled model, or a random model of one of `families` with the bundled tokenizer."""
    family = random.Random(f"model {seed}").choice(families)
    print(f"    {family}", flush=True)
    if family == "bundled":
        return STORYTELLER
    import transformers  # with torch, like the services

    from testing.checkpoints.families import make_checkpoint

    transformers.utils.logging.disable_progress_bar()
    path = make_checkpoint(folder / family, family, seed=seed, vocab_size=VOCAB_SIZE, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORYTELLER / name, path / name)
    return path


def draw_flags(rng: random.Random) -> dict[str, list[Any]]:
    """Return flags for services with a small cache, small steps, and every feature that moves blocks."""
    block_size = rng.choice((4, 8, 16))
    worker = [*QUIET, "--block-size", block_size, "--num-device-blocks", rng.choice((448, 640)) // block_size]
    worker += ["--num-host-blocks", rng.choice((0, 400, 4000)) // block_size, "--num-threads", rng.choice((1, 2))]
    worker += ["--max-num-seqs", rng.choice((8, 16, 32)), "--max-num-batched-tokens", rng.choice((16, 48, 100, 512))]
    scheduler = ["--preemption", rng.choice(("swap", "recompute", "auto")), "--pipeline-depth", rng.choice((1, 2, 3))]
    scheduler += [
        "--policy",
        rng.choice(("agent", "priority", "fcfs", "fair", "deadline")),
        "--watermark",
        rng.choice((0, 0.05)),
        "--max-lease-ms",
        rng.choice((0, 8, 40, 1000)),
    ]
    return {"worker": worker, "scheduler": scheduler}


async def run_round(seed: int, num_requests: int, setting: Setting = DEFAULT) -> Report:
    """Run the round of a seed and return its report.

    All rounds of a process must use one event loop: gRPC may call into the loop of an earlier round, which must not be
    closed.
    """
    rng, report = random.Random(seed), Report(seed, 1)
    flags, requests = draw_flags(rng), draw_requests(rng, num_requests)
    num_at_once = rng.choice((12, 40))
    requests += draw_turns(random.Random(f"turns {seed}"), requests)
    if setting.is_tight:
        requests = lengthened(random.Random(f"lengths {seed}"), requests)
        num_at_once = min(num_at_once, MAX_AT_ONCE)
    report.num_requests = len(requests)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: report.faults.append(f"asyncio: {context}"))
    with tempfile.TemporaryDirectory() as folder:
        model = draw_model(seed, Path(folder), setting.families or FAMILIES)
        start = LoggingStart(Path(folder))
        weights = WEIGHTS[random.Random(f"weights {seed}").choice(setting.weights)]
        print(f"    {' '.join(weights)}", flush=True)
        with running(model, start=start, **_with_weights(CALM, weights)) as calm:
            async with AsyncClient(calm.url) as client:
                requests, alone = await _alone(client, requests)
                if setting.is_tight:
                    tight = await _tight_flags(client, seed, setting.memory, requests, alone, num_at_once)
                    flags = {service: flags[service] + tight[service] for service in flags}
        flags = _with_weights(flags, weights)
        with running(model, start=start, **flags) as system, _front_end(model, system, start) as http_url:
            await _Round(system, http_url, requests, alone, num_at_once, report).run(setting.num_kills)
        report.faults += [f"logged: {line}" for line in start.lines()]
    loop.set_exception_handler(None)
    return report


def _with_weights(flags: dict[str, list[Any]], weights: list[str]) -> dict[str, list[Any]]:
    return {**flags, "worker": [*flags["worker"], *weights]}


async def _tight_flags(
    client: AsyncClient,
    seed: int,
    memory: float,
    requests: Sequence[DrawnRequest],
    alone: Sequence[Received],
    num_at_once: int,
) -> dict[str, list[Any]]:
    """Return flags with which prompts take several steps. They replace flags of the same names that precede them.

    The pool has the share `memory` of the blocks that the requests in flight need, all of them if it is 0. With a given
    share, host memory has a sixth of the pool's blocks: some preempted requests are swapped, others are recomputed.
    """
    rng = random.Random(f"tight {seed}")
    block_size, chunk = rng.choice((4, 8, 16)), rng.choice((16, 48))
    worker: list[Any] = ["--block-size", block_size, "--max-num-batched-tokens", chunk, "--max-num-seqs", MAX_ROWS]
    info = (await client.info()).worker
    assert info is not None
    windows = info.layer_group_windows or (info.sliding_window,)
    shape = CacheShape(block_size, windows, chunk, min(chunk, MAX_ROWS), info.state_bytes > 0)
    lengths = [
        Lengths.of(request, await _num_prompt_tokens(client, request), received)
        for request, received in zip(requests, alone, strict=True)
    ]
    num_blocks = shape.num_device_blocks(lengths, num_at_once, memory or 1.0)
    print(f"    {num_blocks} blocks for requests that need {shape.num_needed(lengths, num_at_once)}", flush=True)
    worker += ["--num-device-blocks", num_blocks]
    if not memory:
        return {"worker": worker, "scheduler": []}
    worker += ["--num-host-blocks", max(1, num_blocks // 6)]
    return {"worker": worker, "scheduler": ["--preemption", "swap"]}


async def _num_prompt_tokens(client: AsyncClient, request: DrawnRequest) -> int:
    arguments = request.arguments
    return len(arguments.get("prompt_token_ids") or await client.tokenize(arguments["prompt"]))


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


async def _alone(client: AsyncClient, requests: Sequence[DrawnRequest]) -> tuple[list[DrawnRequest], list[Received]]:
    """Run each request alone. Return the requests, whose prompts contain all earlier turns, and their outputs."""
    whole: list[DrawnRequest] = []
    alone: list[Received] = []
    for request in requests:
        if request.follows is not None:
            previous = alone[request.follows].samples.get(0, Sample())
            request = request.after_turn(whole[request.follows], previous.token_ids)
        whole.append(request)
        alone.append(await _receive(client, request))
    return whole, alone


async def _receive(client: AsyncClient, request: DrawnRequest) -> Received:
    received = Received()
    try:
        async for output in outputs_of(client, request):
            received.add(output)
    except PagewireError as error:
        received.fail(error)
    return received


class _Round:
    """The requests of a round, which run at the same time on one system, and the expected outputs."""

    def __init__(
        self,
        system: System,
        http_url: str,
        requests: Sequence[DrawnRequest],
        alone: Sequence[Received],
        num_at_once: int,
        report: Report,
    ) -> None:
        self._system, self._http_url = system, http_url
        self._requests, self._alone, self._num_at_once, self._report = requests, alone, num_at_once, report

    async def run(self, num_kills: int) -> None:
        """Run all requests, and report differing outputs. Repeat them until the worker was killed often enough."""
        await self._run_with_kills(num_kills)
        async with AsyncClient(self._system.url) as client:
            await self._rest(client)
            for number in range(min(NUM_AGAIN, len(self._requests))):
                again = await _receive(client, self._requests[number])
                if again != self._alone[number]:
                    difference = _difference(number, self._requests[number], self._alone[number], again)
                    self._report.faults.append(f"again, {difference}")

    async def _run_with_kills(self, num_kills: int) -> None:
        seed, report, num_idle_runs = self._report.seed, self._report, 0
        killer = Killer(self._system, random.Random(f"kills {seed}"), f"seed {seed}")
        killing = asyncio.create_task(killer.kill(num_kills))
        try:
            while True:
                await self._run_once()
                if killing.done() or report.faults:
                    break
                num_idle_runs = num_idle_runs + 1 if killer.num_kills == report.num_kills else 0
                report.num_kills = killer.num_kills
                if num_idle_runs == MAX_IDLE_RUNS:
                    report.faults.append(f"no kill in {num_idle_runs} runs: too few requests run at once")
                    break
        finally:
            killing.cancel()  # has no effect on a task that is done
            with contextlib.suppress(asyncio.CancelledError):
                await killing
            report.num_kills = killer.num_kills

    async def _run_once(self) -> None:
        company = Company(self._system.url, self._http_url, self._requests, self._num_at_once)
        await company.run()
        report = self._report
        report.num_over_http = sum(request.way is not Way.GRPC for request in self._requests)
        report.num_interrupted += sum(company.is_interrupted)
        report.num_refused = sum(received.error is not None for received in self._alone)
        report.num_tokens += sum(received.num_tokens for received in company.received)
        for number, (calm, wild) in enumerate(zip(self._alone, company.received, strict=True)):
            request = self._requests[number]
            if request.way is not Way.GRPC:
                calm = as_over_http(calm, request.arguments)
            if not (wild.begins(calm) if company.is_interrupted[number] else wild == calm):
                report.faults.append(_difference(number, request, calm, wild))

    async def _rest(self, client: AsyncClient) -> None:
        """Wait until no request runs, waits or owns blocks."""
        report = self._report
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
        if loads.num_worker_losses != report.num_kills:
            report.faults.append(f"the worker was lost {loads.num_worker_losses} times and killed {report.num_kills}")
        report.num_preemptions, report.num_swaps = loads.num_preemptions, loads.num_swap_preemptions
        report.num_moved_blocks = loads.num_moved_blocks_out + loads.num_moved_blocks_in
        report.num_cached_tokens = loads.num_cached_prompt_tokens


def _difference(number: int, request: DrawnRequest, calm: Received, wild: Received) -> str:
    return f"request {number} differs: {request}\n    alone: {calm}\n    in company: {wild}"
