"""Measures a tenfold overload: the delay of refusals, the throughput of accepted requests, and the memory.

    python -m bench overload

Both services run as processes, with the bundled model and a queue of `--waiting` requests. In each round, as many
clients as the server has room for send one request after the other; their throughput is the peak. Then requests arrive
at random times, at ten times the rate of the peak, for a minute. Useful tokens are the tokens that arrived within this
time in requests that completed.

The worker has one thread, because it shares two cores with the scheduler and the clients. With two threads the peak
would be lower: each thread waits for the other whenever one has lost its core. The raw numbers are written to
bench/results/overload.json.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

from bench.goals import verdict
from pagewire import AsyncClient, SamplingParams
from pagewire.client.errors import PagewireError, ResourceExhausted
from testing.services import System, running

MODEL = Path("models/storyteller")
INPUT_LEN, OUTPUT_LENS = 100, (128, 384)
MEAN_OUTPUT_LEN = sum(OUTPUT_LENS) / 2
NUM_BLOCKS = 1500
FACTOR = 10
REFUSAL_GOAL_S = 0.050
THROUGHPUT_GOAL = 0.95
MEMORY_GOAL = 1.05  # the scheduler's memory at the end relative to its memory after a quarter of the time


class Tally:
    """Counts requests by outcome, and the useful tokens of requests that end within `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.perf_counter() + seconds
        self.num_tokens = self.num_ended = 0
        self.refusals_s: list[float] = []
        self.failures: list[str] = []

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.end

    def figures(self) -> dict[str, object]:
        return {
            "tokens_per_s": self.num_tokens / self.seconds,
            "num_ended": self.num_ended,
            "num_refused": len(self.refusals_s),
            "failures": sorted(set(self.failures)),
        }


class Load:
    """A generator of random requests to one server."""

    def __init__(self, client: AsyncClient, vocab_size: int, seed: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    async def send(self, tally: Tally) -> None:
        """Send one request, and follow it until it ends or is refused."""
        prompt = self._rng.choices(range(self._vocab_size), k=INPUT_LEN)
        sampling = SamplingParams(temperature=0.0, max_tokens=self._rng.randint(*OUTPUT_LENS), ignore_eos=True)
        num_tokens, started = 0, time.perf_counter()
        try:
            async for output in self._client.stream(None, sampling, prompt_token_ids=prompt):
                if not tally.is_over:
                    num_tokens += len(output.token_ids)
        except ResourceExhausted:
            tally.refusals_s.append(time.perf_counter() - started)
        except PagewireError as error:
            tally.failures.append(f"{error.code.name}: {error}")
        else:
            tally.num_tokens += num_tokens
            tally.num_ended += 1

    async def saturate(self, num_clients: int, tally: Tally) -> None:
        """Let `num_clients` clients send one request after the other until time is over. Running requests may
        finish."""

        async def keep_sending() -> None:
            while not tally.is_over:
                await self.send(tally)

        await asyncio.gather(*(keep_sending() for _ in range(num_clients)))

    async def flood(self, rate: float, tally: Tally) -> None:
        """Send `rate` requests per second at random times until time is over. Running requests may finish."""
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while due < tally.end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self.send(tally))
                due += self._rng.expovariate(rate)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no VmRSS line")


async def watch_memory(system: System, samples: list[int], interval_s: float = 1.0) -> None:
    """Record the scheduler's memory in bytes at each interval, until cancelled."""
    while True:
        samples.append(resident_bytes(system.scheduler.pid))
        await asyncio.sleep(interval_s)


def thinned(seconds: list[float]) -> list[float]:
    """Return at most 1,000 of the durations, sorted and rounded to 0.1 ms. The longest is always included."""
    ordered = sorted(seconds, reverse=True)
    return [round(value, 4) for value in reversed(ordered[:: max(1, -(-len(ordered) // 1000))])]


async def run_round(system: System, client: AsyncClient, arguments: argparse.Namespace, seed: int) -> dict[str, object]:
    load = Load(client, (await client.info()).vocab_size, seed)
    num_clients = arguments.max_num_seqs + arguments.waiting
    await load.saturate(num_clients, Tally(3.0))
    best = Tally(arguments.seconds)
    await load.saturate(num_clients, best)
    peak = best.figures()
    rate = FACTOR * peak["tokens_per_s"] / MEAN_OUTPUT_LEN
    print(f"peak: {peak['tokens_per_s']:,.0f} tokens/s; now {rate:.0f} requests a second", flush=True)
    memory: list[int] = []
    watching = asyncio.create_task(watch_memory(system, memory))
    tally = Tally(arguments.seconds)
    await load.flood(rate, tally)
    watching.cancel()
    flood = tally.figures() | {"refusals_s": thinned(tally.refusals_s), "memory_bytes": memory}
    return {"peak": peak, "rate": rate, "flood": flood}


async def measure(arguments: argparse.Namespace) -> dict:
    # Fill the scheduler's cache index and event buffer before the flood begins, so that they do not grow during it.
    kept = ["--max-kv-event-bytes", 1 << 20]
    scheduler = ["--max-waiting-requests", arguments.waiting, "--max-num-seqs", arguments.max_num_seqs, *kept]
    sizes = ["--max-num-seqs", arguments.max_num_seqs, "--num-device-blocks", NUM_BLOCKS]
    worker = [*sizes, "--num-threads", arguments.num_threads]
    keys = ("seconds", "max_num_seqs", "waiting", "num_threads", "rounds")
    with running(MODEL, worker=worker, scheduler=scheduler) as system:
        async with AsyncClient(system.url) as client:
            rounds = [await run_round(system, client, arguments, seed) for seed in range(arguments.rounds)]
    return {"arguments": {key: getattr(arguments, key) for key in keys}, "rounds": rounds}


def report(figures: dict) -> None:
    rounds = figures["rounds"]
    floods = [entry["flood"] for entry in rounds]
    refusals = sorted(seconds for flood in floods for seconds in flood["refusals_s"])
    memory = [size for flood in floods for size in flood["memory_bytes"]]
    num_sent = sum(flood["num_ended"] + flood["num_refused"] + len(flood["failures"]) for flood in floods)
    share = statistics.median(entry["flood"]["tokens_per_s"] / entry["peak"]["tokens_per_s"] for entry in rounds)
    worst = refusals[int(len(refusals) * 0.99)]
    growth = statistics.median(memory[-5:]) / statistics.median(memory[len(memory) // 4 :][:5])
    num_refused = sum(flood["num_refused"] for flood in floods)
    print(f"{num_sent:,} requests, {FACTOR} times what can be served; {num_refused:,} were refused")
    print(
        f"  refused after {refusals[len(refusals) // 2] * 1e3:.1f} ms (median), p99 {worst * 1e3:.1f} ms, at most "
        f"{refusals[-1] * 1e3:.1f} ms {verdict(worst, REFUSAL_GOAL_S, at_least=False)}"
    )
    print(
        f"  useful tokens/s relative to the peak {share:.3f}, median of {len(rounds)} "
        f"{verdict(share, THROUGHPUT_GOAL, at_least=True)}"
    )
    print(f"  the scheduler's memory has grown to {growth:.3f} times {verdict(growth, MEMORY_GOAL, at_least=False)}")
    for failure in sorted({failure for flood in floods for failure in flood["failures"]}):
        print(f"  failed: {failure}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of the flood (default: 60)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences that run at a time (default: 32)")
    parser.add_argument("--waiting", type=int, default=32, help="requests that may wait (default: 32)")
    parser.add_argument(
        "--num-threads",
        type=int,
        default=1,
        help="CPU threads of the worker (default: 1; the other cores serve the clients)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each of a peak and a flood (default: 3)")
