"""Measures a polite tenant's gaps between tokens and prefix cache hits, alone and next to a hostile tenant.

    python -m bench hostile

Both services run as processes, with the 54M shape, `--max-decode-slowdown` and a tenants file in which only the hostile
tenant has quotas. The polite tenant streams alone, then during each attack, then during all attacks together. It sends
one prompt before the attack, and again after its streams, to measure whether the prompt is still cached. The growth of
the scheduler's memory is measured too. The attackers run in one process of the lowest priority, which is the best
approximation of a separate machine. The raw numbers are written to bench/results/hostile.json.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio

from bench.checkpoint import tokenized_checkpoint
from bench.goals import verdict
from bench.measure import medians
from bench.services.interference import gap_quantiles, random_prompt, stream
from pagewire import AsyncClient, SamplingParams, Session, StructuredOutputs
from pagewire.client.errors import PagewireError
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from testing import rapid_resets
from testing.services import Service, running

TOKENIZER = Path("models/storyteller/tokenizer.json")
# Ids in the tokenizer's vocabulary, after the single bytes.
TOKEN_IDS = range(300, 1000)
END = 0
KEYS = {"polite": "key-of-the-polite", "hostile": "key-of-the-hostile", "watcher": "key-of-the-watcher"}
QUOTA = {"max_requests": 8, "max_sequences": 4, "max_queued_tokens": 8000, "max_blocks": 400}
NUM_STREAMS, INPUT_LEN, OUTPUT_LEN = 4, 100, 400
REPEATED_LEN = 405  # length of the prompt that is sent twice
NUM_HOARDED, HOARDED_LEN = 30, 1500  # number of sessions, and tokens of each prompt; together more than the pool
MAX_DECODE_SLOWDOWN = 1.5
GOAL = 2.0
MAX_GROWTH_MIB = 200
PAUSE_S = 0.01
# The expected refusals of attacks. Any other failure ends the attacker and the benchmark.
REFUSALS = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
)


class Attacker:
    """A client of one tenant whose requests are meant to overload the server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rng = random.Random(0)
        self._client = AsyncClient(url, api_key=KEYS["hostile"])
        self._channel = grpc.aio.insecure_channel(url)
        self._stub = pb_grpc.SchedulerServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {KEYS['hostile']}"),)

    async def send_long_texts(self) -> None:
        """Send two texts at a time. Some are too long for any prompt, and some have the maximum size that the server
        reads."""
        words = "once upon a time there was a fox " * 130_000
        await together(2, lambda: self._complete(words[: self._rng.choice((60_000, 1 << 20, 4 << 20))], max_tokens=1))

    async def send_prompts(self) -> None:
        """Send more requests than the quota allows, with the highest priority. Each prompt is new to the cache."""
        await together(16, lambda: self._complete_tokens(self._rng.randint(1, 2000), priority=-(2**31), max_tokens=200))

    async def leave_early(self) -> None:
        """Send requests and cancel them soon after they have begun."""

        async def leave() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.0, 0.1)):
                    await self._complete_tokens(500, max_tokens=1000, n=4)

        await together(8, leave)

    async def guess_keys(self) -> None:
        """Send RPCs with wrong keys, and with the name of the other tenant."""

        async def guess() -> None:
            wrong = (("authorization", f"Bearer {self._rng.random()}"),)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), tenant="polite")
            for metadata in (wrong, self._metadata):
                with refused():
                    await self._stub.Generate(request, metadata=metadata).read()
                    raise AssertionError("the server accepted a wrong key, or the name of another tenant")

        await together(8, guess)

    async def hoard_results(self) -> None:
        """Submit detached requests with all log-probabilities, and read their results repeatedly."""

        async def hoard() -> None:
            prompt = self._rng.choices(TOKEN_IDS, k=100)
            sampling = SamplingParams(max_tokens=100, n=4, logprobs=20, prompt_logprobs=20, ignore_eos=True)
            with refused():
                request_id = await self._client.submit(None, sampling, prompt_token_ids=prompt)
                for _ in range(20):
                    await self._client.result(request_id)

        await together(4, hoard)

    async def hoard_cache(self) -> None:
        """Send many sessions with long prompts that claim to return and request retention for 2**32 - 1 seconds."""
        sent = itertools.count()

        async def hoard() -> None:
            session = Session(f"session {next(sent) % NUM_HOARDED}", will_return=True, retention_seconds=2**32 - 1)
            await self._complete_tokens(HOARDED_LEN, session=session, max_tokens=1)

        await together(4, hoard)

    async def never_read(self) -> None:
        """Start RPCs of many requests each, most of them invalid, and never read the responses."""

        async def requests() -> AsyncIterator[pb.GenerateManyRequest]:
            for number in range(100_000):
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), request_id="x" * (number % 300))
                request.sampling.max_tokens = number % 5000
                yield pb.GenerateManyRequest(submit=pb.Submission(stream_id=(16 * number) % 2**64, request=request))
                await asyncio.sleep(0)

        async def fill() -> None:
            call = self._stub.GenerateMany(requests(), metadata=self._metadata)
            await asyncio.sleep(2.0)
            call.cancel()

        await together(2, fill)

    async def open_connections(self) -> None:
        """Open connections, send nothing, and close them again."""
        host, port = self._url.rsplit(":", 1)

        async def hold() -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                for _ in range(200):
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=1.0))
                    await asyncio.sleep(0)
                await asyncio.sleep(0.5)

        await together(2, hold)

    async def reset_calls(self) -> None:
        """Start RPCs without a key and reset each of them immediately, on 2 connections and on 16."""
        while True:
            for num_connections in (2, 16):
                # the port refuses connections, or the server does not respond in time
                with contextlib.suppress(OSError, TimeoutError):
                    await rapid_resets.flood(self._url, rapid_resets.CHECK, num_connections, 100_000)
                await asyncio.sleep(PAUSE_S)

    async def send_ambiguous_grammars(self) -> None:
        """Send new grammars whose rules match outputs in an exponentially growing number of ways."""

        async def send() -> None:
            letters = "".join(self._rng.choices("cdefghij", k=8))
            grammar = f'start: s\ns: s s | "a" | "b" | "{letters}"'
            await self._complete_tokens(
                20, max_tokens=400, n=4, structured_outputs=StructuredOutputs(grammar=grammar), logit_bias={END: -100.0}
            )

        await together(16, send)

    async def _complete_tokens(
        self, num_tokens: int, *, priority: int = 0, session: Session | None = None, **sampling: Any
    ) -> None:
        prompt = self._rng.choices(TOKEN_IDS, k=num_tokens)
        with refused():
            await self._client.complete(
                None,
                SamplingParams(ignore_eos=True, **sampling),
                prompt_token_ids=prompt,
                priority=priority,
                session=session,
            )

    async def _complete(self, text: str, max_tokens: int) -> None:
        with refused():
            await self._client.complete(text, SamplingParams(max_tokens=max_tokens))


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Suppress errors of refused calls. The server may accept or refuse the call."""
    try:
        yield
    except (PagewireError, grpc.aio.AioRpcError) as error:
        if (error.code if isinstance(error, PagewireError) else error.code()) not in REFUSALS:
            raise


async def together(number: int, act: Callable[[], Awaitable[None]]) -> None:
    """Run `number` loops in parallel, each of which repeats `act`, until cancelled."""

    async def again_and_again() -> None:
        while True:
            await act()
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(again_and_again() for _ in range(number)))


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "long texts": Attacker.send_long_texts,
    "prompts": Attacker.send_prompts,
    "leaving early": Attacker.leave_early,
    "wrong keys": Attacker.guess_keys,
    "detached results": Attacker.hoard_results,
    "hoarded cache": Attacker.hoard_cache,
    "unread answers": Attacker.never_read,
    "connections": Attacker.open_connections,
    "rapid resets": Attacker.reset_calls,
    "ambiguous grammars": Attacker.send_ambiguous_grammars,
}
ARMS = {"calm": (), **{name: (name,) for name in ATTACKS}, "all of them": tuple(ATTACKS)}


async def attack(url: str, names: tuple[str, ...]) -> None:
    """Run the attacks until this process is killed."""
    attacker = Attacker(url)
    await asyncio.gather(*(ATTACKS[name](attacker) for name in names))


@contextlib.asynccontextmanager
async def attacked(benchmark: str, argument: str, warm_up_s: float) -> AsyncIterator[None]:
    """Run the attackers of a benchmark at the lowest priority for the duration of the block."""
    # A separate command, because code between fork and exec could conflict with gRPC's threads.
    command = ("nice", "-n", "19", sys.executable, "-m", "bench", benchmark, "--attack", argument)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await asyncio.sleep(warm_up_s)
        yield
        assert process.returncode is None, f"the attackers ended with {process.returncode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def tenants(directory: Path) -> Path:
    """Write the tenants file and return its path. The content is JSON, which is also valid YAML."""
    further = {"polite": {}, "hostile": QUOTA, "watcher": {"operator": True}}
    entries = {
        name: {"api_keys": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"], **further[name]}
        for name, key in KEYS.items()
    }
    path = directory / "tenants.yaml"
    path.write_text(json.dumps({"tenants": entries}))
    return path


async def until_idle(url: str) -> None:
    """Wait until the server is idle. Detached requests of the attackers continue after the attack."""
    async with AsyncClient(url, api_key=KEYS["watcher"]) as client:
        while (loads := await client.loads()).num_running or loads.num_waiting:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)


async def run_round(url: str, names: tuple[str, ...], rng: random.Random, warm_up_s: float) -> dict[str, float]:
    """Return the quantiles of the polite tenant's gaps in seconds, and the cached tokens of its repeated prompt."""
    async with AsyncClient(url, api_key=KEYS["polite"]) as client:
        repeated = random_prompt(rng, REPEATED_LEN)
        await num_cached_tokens(client, repeated)
        asked = json.dumps([url, *names])
        async with attacked("hostile", asked, warm_up_s) if names else contextlib.nullcontext():
            prompts = [random_prompt(rng, INPUT_LEN) for _ in range(NUM_STREAMS)]
            streams = await asyncio.gather(*(stream(client, prompt, OUTPUT_LEN) for prompt in prompts))
            num_cached = await num_cached_tokens(client, repeated)
    return {**gap_quantiles(streams), "cached": num_cached}


async def num_cached_tokens(client: AsyncClient, prompt: list[int]) -> int:
    """Send a prompt, and return the number of its tokens that were cached."""
    completion = await client.complete(None, SamplingParams(max_tokens=1), prompt_token_ids=prompt)
    return completion.usage.cached_tokens


async def measure(arguments: argparse.Namespace) -> dict | None:
    if arguments.attack is not None:
        url, *names = json.loads(arguments.attack)
        return await attack(url, tuple(names))
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        scheduler = ["--tenants", tenants(directory), "--max-decode-slowdown", MAX_DECODE_SLOWDOWN]
        worker = ["--num-device-blocks", 1024, "--num-threads", arguments.num_threads]
        model = tokenized_checkpoint("54M", TOKENIZER, directory / "model")
        with running(model, worker=worker, scheduler=scheduler) as system:
            rounds = await run_rounds(system.url, system.scheduler, arguments)
    load = {"model": "54M", "streams": NUM_STREAMS, "quota": QUOTA, "max_decode_slowdown": MAX_DECODE_SLOWDOWN}
    return {"load": load, "median": medians(rounds), "rounds": rounds}


async def run_rounds(url: str, scheduler: Service, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    rng = random.Random(0)
    await run_round(url, (), rng, 0.0)  # warm-up
    resident_bytes = scheduler.resident_bytes
    for _ in range(arguments.rounds):
        for arm, names in ARMS.items():
            await until_idle(url)
            scheduler.forget_peak()
            found = await run_round(url, names, rng, arguments.warm_up)
            growth_mib = (scheduler.peak_bytes - resident_bytes) / 2**20
            rounds[arm].append(found | {"growth_mib": growth_mib})
            p99, longest = (found[key] * 1000 for key in ("p99", "max"))
            cached = f"{found['cached']:.0f} of {REPEATED_LEN} tokens cached"
            print(
                f"  {arm:16} p99 {p99:6.1f} ms, longest {longest:6.1f} ms, {growth_mib:4.0f} MiB, {cached}", flush=True
            )
    return rounds


def report(figures: dict) -> None:
    found = figures["median"]
    print(f"gaps between tokens of {NUM_STREAMS} streams of the polite tenant, in ms; cached tokens of {REPEATED_LEN}")
    print("in its repeated prompt; medians of the rounds")
    for arm, median in found.items():
        ratio = median["p99"] / found["calm"]["p99"]
        gaps = ", ".join(f"{key} {median[key] * 1000:.1f}" for key in ("p50", "p99", "max"))
        cached = f"{median['cached']:.0f} cached {verdict(median['cached'], found['calm']['cached'], at_least=True)}"
        print(f"  {arm:16} {gaps}; p99 {ratio:.2f} times calm {verdict(ratio, GOAL, at_least=False)}; {cached}")
        growth = median["growth_mib"]
        print(f"  {'':16} memory {growth:.0f} MiB more {verdict(growth, MAX_GROWTH_MIB, at_least=False)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every attack (default: 3)")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds for the attackers to start (default: 4)")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of the worker (default 1)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
