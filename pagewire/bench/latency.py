"""`pagewire bench latency`: the latency of one batch of requests on an otherwise idle server."""

import argparse
import asyncio
import functools
import itertools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagewire.bench import flags, result, target
from pagewire.bench.profile import Profile, ServerTimes, profile, read_times, report
from pagewire.bench.run import Run, check_fits, exit_code, run
from pagewire.bench.statistics import Summary, summarize
from pagewire.bench.workload import LengthRange, Workload
from pagewire.cli import client_flags, figures
from pagewire.client.client import AsyncClient
from pagewire.client.server_info import ServerInfo
from pagewire.hosting import local_server
from pagewire.hosting.supervisor import free_port
from pagewire.options import Parser
from pagewire.progress import Progress

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
_INTEGERS: flags.Integers = {
    "--batch-size": (client_flags.count, 1, "number of requests at the same time"),
    "--num-iters-warmup": (client_flags.count_or_zero, 10, "number of unmeasured iterations to run first"),
    "--num-iters": (client_flags.count, 30, "number of iterations to measure"),
}


@dataclass(frozen=True, slots=True)
class Iterations:
    """The measured iterations of the latency benchmark. One iteration is one batch of requests.

    `latencies` has the seconds of each complete iteration, and `run` has the requests of all iterations. `profile` is
    None unless `--profile` was given.
    """

    info: ServerInfo
    latencies: tuple[float, ...]
    run: Run
    profile: Profile | None = None


def main(arguments: Sequence[str]) -> int:
    own, serve_flags = local_server.split_serve_flags(arguments)
    description = "Measure how long a batch of requests takes on an otherwise idle server."
    parser = flags.bench_parser("latency", description, _INTEGERS, input_len=32, output_len=128)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show the parts of a token's time: in the worker, between steps, and on the way to the client",
    )
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="address of the server's metrics, http://HOST:9090/metrics; needed for --profile with --url",
    )
    parsed = parser.parse_args(own)
    _check(parser, parsed)
    path = result.path_of(parser, parsed)
    metrics_url, extra_flags = parsed.metrics_url, []
    if parsed.profile and parsed.url is None:
        port = free_port("127.0.0.1")
        metrics_url, extra_flags = f"http://127.0.0.1:{port}/metrics", [f"--metrics-port={port}"]
    with target.opened(parser, parsed, serve_flags, extra_flags) as client:
        measured = asyncio.run(_Bench(parsed, client, metrics_url).iterate())
    summary = summarize(measured.latencies, PERCENTS)
    if summary is not None:
        print(latency_table(summary), flush=True)
    if measured.profile is not None:
        print(report(measured.profile), flush=True)
    if path is not None:
        result.write(path, _figures(parsed, measured, summary))
    return exit_code(measured.run)


def latency_table(summary: Summary) -> str:
    lines = [f"Avg latency: {figures.duration(summary.mean)}", f"Std latency: {figures.duration(summary.std)}"]
    lines += [f"{percent:g}% percentile latency: {figures.duration(value)}" for percent, value in summary.percentiles]
    return "\n".join(lines)


class _Bench:
    def __init__(self, parsed: argparse.Namespace, client: AsyncClient, metrics_url: str | None) -> None:
        self._parsed = parsed
        self._client = client
        self._metrics_url = metrics_url
        input_len, output_len = (LengthRange.around(length, 0.0) for length in (parsed.input_len, parsed.output_len))
        self._workload = Workload(parsed.batch_size, input_len, output_len)
        self._num_batches = 0

    async def iterate(self) -> Iterations:
        parsed = self._parsed
        async with self._client:
            info = await self._client.info()
            check_fits(self._workload, info)
            warm_ups = [self._workload] * parsed.num_iters_warmup
            warmed = await self._batches("latency (warming up)", info, warm_ups)
            if warmed and warmed[-1].was_interrupted:
                return Iterations(info, (), Run((), 0.0, was_interrupted=True))
            if parsed.profile:
                return await self._profiled(info)
            return _iterations(info, await self._batches("latency", info, [self._workload] * parsed.num_iters))

    async def _profiled(self, info: ServerInfo) -> Iterations:
        """Measure the latency and the time profile, which shows where the time of a token is spent. The benchmark
        alternates between batches of requests with one output token and full batches, so that both kinds run under
        equal conditions."""
        assert self._metrics_url is not None, "--profile was checked to have one"
        url, num_iters = self._metrics_url, self._parsed.num_iters
        workloads = [replace(self._workload, output_len=LengthRange(1, 1)), self._workload] * num_iters
        times = [read_times(url)]

        async def ended() -> None:
            times.append(await asyncio.to_thread(read_times, url))

        runs = await self._batches("latency", info, workloads, ended)
        # A last run without a partner has one output token, or was interrupted.
        measured = _iterations(info, runs[1::2] + runs[len(runs) - len(runs) % 2 :])
        if len(measured.latencies) < num_iters or measured.run.was_interrupted:
            return measured
        spent = [after.since(before) for before, after in itertools.pairwise(times)]
        prefill, full = (functools.reduce(ServerTimes.plus, part) for part in (spent[::2], spent[1::2]))
        return replace(measured, profile=profile(prefill, full, measured.run.records))

    async def _batches(
        self,
        name: str,
        info: ServerInfo,
        workloads: Sequence[Workload],
        ended: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> list[Run]:
        """Run batches of requests one after another until a batch is interrupted. Return the timing of all batches.

        The callback `ended` is awaited after each complete batch. If it is cancelled, the loop ends too. Each batch has
        new prompts, so that no batch finds its prompts in the prefix cache.
        """
        num_requests = sum(workload.num_prompts for workload in workloads)
        line = Progress(num_requests, None if self._parsed.disable_tqdm else sys.stderr, title=name)
        runs: list[Run] = []
        for workload in workloads:
            seed = self._parsed.seed + self._num_batches * workload.num_prompts
            self._num_batches += 1
            planned = replace(workload, seed=seed).requests(info.vocab_size)
            runs.append(await run(self._client, planned, flags.sampling(self._parsed), line))
            if runs[-1].was_interrupted:
                break
            try:
                await ended()
            except asyncio.CancelledError:
                runs.append(Run((), 0.0, was_interrupted=True))
                break
        line.close()
        return runs


def _iterations(info: ServerInfo, runs: Sequence[Run]) -> Iterations:
    """Build the result of the latency benchmark from the timing of its batches. The result has one latency for each
    batch in which all requests finished. An interrupted batch is left out."""
    complete = [ran for ran in runs if not ran.was_interrupted]
    latencies = tuple(ran.duration for ran in complete if all(record.is_finished for record in ran.records))
    records = tuple(record for ran in complete for record in ran.records)
    return Iterations(info, latencies, Run(records, sum(latencies), was_interrupted=len(complete) < len(runs)))


def _check(parser: Parser, parsed: argparse.Namespace) -> None:
    if not parsed.profile:
        if parsed.metrics_url is not None:
            parser.error("--metrics-url requires --profile")
        return
    if parsed.batch_size != 1 or parsed.output_len < 2:
        parser.error(
            f"--profile measures one stream of at least two tokens: --batch-size is {parsed.batch_size} and "
            f"--output-len {parsed.output_len}, give 1 and at least 2"
        )
    if (parsed.url is None) != (parsed.metrics_url is None):
        parser.error("--profile needs both --url and --metrics-url, or neither")


def _figures(parsed: argparse.Namespace, measured: Iterations, summary: Summary | None) -> dict[str, Any]:
    own = {
        "batch_size": parsed.batch_size,
        "input_len": parsed.input_len,
        "output_len": parsed.output_len,
        "seed": parsed.seed,
        "avg_latency": None if summary is None else summary.mean,
        "std_latency": None if summary is None else summary.std,
        "latencies": measured.latencies,
        "percentiles": {} if summary is None else {f"{p:g}": value for p, value in summary.percentiles},
    }
    if measured.profile is not None:
        own["profile"] = asdict(measured.profile)
    return result.figures("latency", measured.info, measured.run, own)
