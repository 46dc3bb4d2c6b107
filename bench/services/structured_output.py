"""Measures the cost of grammars in both services: tokens per second, first tokens, and other requests' gaps.

    python -m bench structured-output

Both services run as processes, with the 54M shape and a tokenizer of the same vocabulary size. In turns, 32 streams run
with and without a schema. First tokens are measured on an idle server: without a grammar, with a known grammar, and
with new schemas of 5 kB. The gaps of 8 other streams are measured alone, next to new requests, and next to new schemas.
They are also measured next to a client of the lowest priority that sends hostile grammars. The raw numbers are written
to bench/results/structured_output.INSTRUCTIONS.json.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.checkpoint import tokenized_checkpoint
from bench.goals import verdict
from bench.measure import in_turns, medians
from bench.peers.peers import compute_with
from bench.services.hostile import attacked, refused
from bench.services.interference import gap_quantiles, random_prompt, stream
from bench.tokenizer import trained_tokenizer
from pagewire import AsyncClient, SamplingParams
from testing.grammars.hostile import HOSTILE
from testing.services import running

SHAPE, VOCAB_SIZE = "54M", 32_000
INPUT_LEN = 100
NUM_ROWS, NUM_CALM = 32, 8
MIN_RATIO, MAX_SEEN_MS, MAX_NEW_MS, MAX_GAP_RATIO = 0.95, 2.0, 20.0, 2.0
PAUSE_S = 0.25
WARM_UP_S = 4.0  # start-up time of the attackers
# A schema of unlimited records, so that all rows remain constrained during the measurement.
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["reader", "writer", "owner"]},
        "mail": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.(com|org)$"},
        "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
    },
    "required": ["name", "age", "role", "mail", "scores"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 1000}


def new_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema of 5 kB that was never sent before."""
    forms: list[dict[str, Any]] = [*RECORD["properties"].values(), RECORD]
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    while len(json.dumps(schema)) < 5000:
        name = f"field_{rng.getrandbits(48):x}"
        schema["properties"][name] = rng.choice(forms) | {"description": f"the {name} of the whole"}
        schema["required"].append(name)
    return schema


# Tokens per second


async def tokens_per_second(client: AsyncClient, rng: random.Random, num_tokens: int, options: dict[str, Any]) -> float:
    """Return the tokens per second of all rows together while all of them decode."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **options)
    times: list[float] = []

    async def run() -> None:
        async for output in client.stream(None, sampling, prompt_token_ids=random_prompt(rng, INPUT_LEN)):
            times.extend(time.perf_counter() for _ in output.token_ids)

    await asyncio.gather(*(run() for _ in range(NUM_ROWS)))
    assert len(times) == NUM_ROWS * num_tokens, f"{len(times)} tokens arrived"
    times.sort()
    # From the time when every row has begun, to the time when the first row may be done.
    first, last = 2 * NUM_ROWS, len(times) - NUM_ROWS
    return (last - first) / (times[last] - times[first])


async def measure_rows(client: AsyncClient, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        rates: dict[str, list[float]] = {"none": [], "schema": []}
        for index, arm in in_turns(list(rates), arguments.rounds):
            options: dict[str, Any] = {"temperature": temperature}
            if arm == "schema":
                options["structured_outputs"] = {"json": RECORDS}
            rate = await tokens_per_second(client, random.Random(index), arguments.num_tokens, options)
            if index > 0:
                rates[arm].append(rate)
        median = {arm: statistics.median(of_arm) for arm, of_arm in rates.items()}
        found[f"temperature {temperature:g}"] = {"median": median, "rounds": rates}
    return found


# First tokens


async def first_token(client: AsyncClient, rng: random.Random, schema: dict[str, Any] | None) -> float:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=2, structured_outputs=None if schema is None else {"json": schema}
    )
    began = time.perf_counter()
    async for output in client.stream(None, sampling, prompt_token_ids=random_prompt(rng, INPUT_LEN)):
        if output.token_ids:
            return time.perf_counter() - began
    raise AssertionError("no token arrived")


async def measure_first_tokens(client: AsyncClient, num_requests: int) -> dict[str, Any]:
    rng = random.Random(1)
    seconds: dict[str, list[float]] = {"none": [], "seen": [], "new": []}
    seen = new_schema(rng)
    for index in range(num_requests + 3):
        for arm, schema in (("none", None), ("seen", seen), ("new", new_schema(rng))):
            took = await first_token(client, rng, schema)
            if index >= 3:  # the first requests warm up
                seconds[arm].append(took)
    return {"median": {arm: statistics.median(of_arm) for arm, of_arm in seconds.items()}, "seconds": seconds}


# Neighbours


async def send_requests(client: AsyncClient, rng: random.Random, with_schemas: bool) -> None:
    """Send a short request at intervals, until cancelled."""
    while True:
        await first_token(client, rng, new_schema(rng) if with_schemas else None)
        await asyncio.sleep(PAUSE_S)


async def gaps_of_calm_streams(client: AsyncClient, rng: random.Random, num_tokens: int) -> dict[str, float]:
    prompts = [random_prompt(rng, INPUT_LEN) for _ in range(NUM_CALM)]
    streams = await asyncio.gather(*(stream(client, prompt, num_tokens) for prompt in prompts))
    return gap_quantiles(streams)


@contextlib.asynccontextmanager
async def beside(act: Callable[[], Coroutine[Any, Any, None]] | None) -> AsyncIterator[None]:
    """Run an action in a task for the duration of the block, or nothing if `act` is None."""
    task = None if act is None else asyncio.create_task(act())
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def attack(url: str) -> None:
    """Send hostile grammars, eight at a time, until this process is killed. A number makes each grammar new."""
    rng = random.Random(2)

    def options() -> dict[str, Any]:
        kind, text = HOSTILE[rng.choice(list(HOSTILE))]
        number = f"{rng.getrandbits(48)}"
        match kind:
            case "json_schema":
                return {"json": text + " " * rng.randrange(100_000)}
            case "regex":
                return {"regex": f"{text}|{number}"}
        return {"grammar": f"{text}\n// {number}"}

    async def again_and_again(client: AsyncClient) -> None:
        while True:
            sampling = SamplingParams(max_tokens=100, structured_outputs=options())
            with refused():
                await client.complete(None, sampling, prompt_token_ids=[1, 2, 3])

    async with AsyncClient(url) as client:
        await asyncio.gather(*(again_and_again(client) for _ in range(8)))


async def measure_neighbours(url: str, client: AsyncClient, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(3)
    acts: dict[str, Callable[[], Coroutine[Any, Any, None]] | None] = {
        "alone": None,
        "requests": lambda: send_requests(client, rng, with_schemas=False),
        "new schemas": lambda: send_requests(client, rng, with_schemas=True),
        "hostile": None,
    }
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in acts}
    for index in range(arguments.rounds + 1):
        for arm, act in acts.items():
            attackers = attacked("structured_output", url, WARM_UP_S)
            async with attackers if arm == "hostile" else beside(act):
                figures = await gaps_of_calm_streams(client, rng, 2 * arguments.num_tokens)
            if index:  # round 0 warms up
                rounds[arm].append(figures)
    return {"median": medians(rounds), "rounds": rounds}


def variant() -> str:
    return compute_with()[0]


def report(found: dict[str, Any]) -> None:
    print(f"tokens per second of {NUM_ROWS} rows")
    for name, part in found["rows"].items():
        none, schema = part["median"]["none"], part["median"]["schema"]
        said = verdict(schema / none, MIN_RATIO, at_least=True)
        print(f"  {name}: {none:.0f} without, {schema:.0f} with a schema: {schema / none:.3f} {said}")
    first = {arm: 1000 * value for arm, value in found["first_tokens"]["median"].items()}
    print(f"first token of an idle server: {first['none']:.1f} ms without a grammar")
    for arm, goal in (("seen", MAX_SEEN_MS), ("new", MAX_NEW_MS)):
        later = first[arm] - first["none"]
        print(f"  {arm} schema of 5 kB: {later:.1f} ms later {verdict(later, goal, at_least=False)}")
    gaps = found["neighbours"]["median"]
    print(f"gaps between tokens of {NUM_CALM} streams, in ms")
    for arm, median in gaps.items():
        print(f"  {arm:12}", ", ".join(f"{key} {value * 1000:.1f}" for key, value in median.items()))
    ratio = gaps["hostile"]["p99"] / gaps["alone"]["p99"]
    print(f"  p99 with hostile grammars is {ratio:.2f} times p99 alone {verdict(ratio, MAX_GAP_RATIO, at_least=False)}")
    ratio = gaps["new schemas"]["p99"] / gaps["requests"]["p99"]
    print(f"  p99 with new schemas is {ratio:.2f} times p99 with requests without schemas")


async def measure(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if arguments.attack is not None:
        return await attack(arguments.attack)
    with tempfile.TemporaryDirectory() as made:
        return await serve(tokenized_checkpoint(SHAPE, trained_tokenizer(VOCAB_SIZE), Path(made) / SHAPE), arguments)


async def serve(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    worker = ["--num-device-blocks", 2048, "--num-threads"]
    with running(model, worker=[*worker, arguments.num_threads]) as system:
        async with AsyncClient(system.url) as client:
            found["rows"] = await measure_rows(client, arguments)
            found["first_tokens"] = await measure_first_tokens(client, arguments.num_requests)
    # One thread, so that the other core is left to clients and the scheduler, which usually run on other machines.
    with running(model, worker=[*worker, 1]) as system:
        async with AsyncClient(system.url) as client:
            found["neighbours"] = await measure_neighbours(system.url, client, arguments)
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each arm (default: 3)")
    parser.add_argument("--num-tokens", type=int, default=200, help="output tokens of a row (default: 200)")
    parser.add_argument(
        "--num-requests", type=int, default=30, help="requests whose first token is timed (default: 30)"
    )
    parser.add_argument("--num-threads", type=int, default=2, help="CPU threads of the worker (default: 2)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
