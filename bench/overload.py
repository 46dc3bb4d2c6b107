"""What ten times too many requests do: refusals come at once, those that are taken lose nothing, memory stays flat.

    python -m bench.overload

Both services run as processes, with the bundled model and a queue of `--waiting` requests. First as many clients as
the server can hold send one request after the other: that is the peak. Then requests come at ten times the rate of
the peak, at random times, for a minute. Useful tokens are those of requests that ended. Raw numbers go to
bench/results/overload.json.
"""

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.record import RESULTS, machine, verdict, write
from pagewire import Client, SamplingParams
from pagewire.errors import PagewireError, ResourceExhausted
from tests.system.services import System, running

MODEL = Path("models/storyteller")
INPUT_LEN, OUTPUT_LENS = 48, (32, 64)
FACTOR = 10
REFUSAL_GOAL_S = 0.050
THROUGHPUT_GOAL = 0.95
MEMORY_GOAL = 1.05  # of the scheduler at the end, against a quarter of the way


@dataclass
class Tally:
    """What came of requests. Tokens and requests count when they ended."""

    num_tokens: int = 0
    num_ended: int = 0
    refusals_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figures(self, seconds: float) -> dict[str, object]:
        return {
            "seconds": seconds,
            "tokens_per_s": self.num_tokens / seconds,
            "requests_per_s": self.num_ended / seconds,
            "num_ended": self.num_ended,
            "num_refused": len(self.refusals_s),
            "failures": sorted(set(self.failures)),
        }


class Load:
    """Random requests to one server."""

    def __init__(self, client: Client, vocab_size: int, seed: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    async def send(self, tally: Tally) -> None:
        """One request, to its end or refusal."""
        prompt = self._rng.choices(range(self._vocab_size), k=INPUT_LEN)
        sampling = SamplingParams(temperature=0.0, max_tokens=self._rng.randint(*OUTPUT_LENS), ignore_eos=True)
        num_tokens, started = 0, time.perf_counter()
        try:
            async for output in self._client.generate(None, sampling, prompt_token_ids=prompt):
                num_tokens += len(output.token_ids)
        except ResourceExhausted:
            tally.refusals_s.append(time.perf_counter() - started)
        except PagewireError as error:
            tally.failures.append(f"{error.code.name}: {error}")
        else:
            tally.num_tokens += num_tokens
            tally.num_ended += 1

    async def saturate(self, num_clients: int, seconds: float) -> Tally:
        """`num_clients` send one request after the other."""
        tally, end = Tally(), time.perf_counter() + seconds

        async def keep_sending() -> None:
            while time.perf_counter() < end:
                await self.send(tally)

        await asyncio.gather(*(keep_sending() for _ in range(num_clients)))
        return tally

    async def flood(self, rate: float, seconds: float, tally: Tally) -> None:
        """`rate` requests per second at random times. Those that run at the end are left to end."""
        async with asyncio.TaskGroup() as group:
            end = due = time.perf_counter()
            end += seconds
            while due < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self.send(tally))
                due += self._rng.expovariate(rate)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} tells no memory")


async def watch_memory(system: System, samples: list[int], interval_s: float = 1.0) -> None:
    """The scheduler's, until cancelled."""
    while True:
        samples.append(resident_bytes(system.scheduler.pid))
        await asyncio.sleep(interval_s)


async def measure(system: System, arguments: argparse.Namespace) -> dict[str, object]:
    async with Client(system.url) as client:
        load = Load(client, (await client.server_info()).vocab_size, arguments.seed)
        num_clients = arguments.max_num_seqs + arguments.waiting
        await load.saturate(num_clients, 3.0)
        started = time.perf_counter()
        peak = (await load.saturate(num_clients, arguments.seconds / 2)).figures(time.perf_counter() - started)
        print(f"peak: {peak['tokens_per_s']:,.0f} tokens/s, {peak['requests_per_s']:.1f} requests/s", flush=True)
        tally, memory = Tally(), []
        watching = asyncio.create_task(watch_memory(system, memory))
        started = time.perf_counter()
        await load.flood(FACTOR * peak["requests_per_s"], arguments.seconds, tally)
        flood = tally.figures(time.perf_counter() - started)
        watching.cancel()
    flood |= {"refusals_s": sorted(tally.refusals_s), "memory_bytes": memory}
    return {"peak": peak, "flood": flood}


def report(figures: dict) -> None:
    peak, flood = figures["peak"], figures["flood"]
    refusals, memory = flood["refusals_s"], flood["memory_bytes"]
    share = flood["tokens_per_s"] / peak["tokens_per_s"]
    worst = refusals[int(len(refusals) * 0.99)]
    growth = statistics.median(memory[-5:]) / statistics.median(memory[len(memory) // 4 :][:5])
    sent = flood["num_ended"] + flood["num_refused"] + len(flood["failures"])
    print(
        f"{sent:,} requests in {flood['seconds']:.0f} s, {FACTOR} times what can be served; {len(refusals):,} refused"
    )
    print(
        f"  refused after {refusals[len(refusals) // 2] * 1e3:.1f} ms (median), p99 {worst * 1e3:.1f} ms, at most "
        f"{refusals[-1] * 1e3:.1f} ms {verdict(worst, REFUSAL_GOAL_S, at_least=False)}"
    )
    print(f"  useful tokens/s against the peak {share:.3f} {verdict(share, THROUGHPUT_GOAL, at_least=True)}")
    print(f"  the scheduler's memory at the end {growth:.3f} times {verdict(growth, MEMORY_GOAL, at_least=False)}")
    for failure in flood["failures"]:
        print(f"  failed: {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood (default 60)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences that run at a time (default 32)")
    parser.add_argument("--waiting", type=int, default=32, help="requests that may wait (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scheduler = ["--max-waiting-requests", arguments.waiting, "--max-num-seqs", arguments.max_num_seqs]
    with running(MODEL, worker=["--max-num-seqs", arguments.max_num_seqs], scheduler=scheduler) as system:
        figures = asyncio.run(measure(system, arguments))
    report(figures)
    write(RESULTS / "overload.json", {"machine": machine(), "arguments": vars(arguments)} | figures)


if __name__ == "__main__":
    main()
