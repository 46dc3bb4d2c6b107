"""`pagewire bench throughput`: the tokens per second of a server for many requests that arrive at once."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagewire.bench import flags, result, target
from pagewire.bench.run import Run, check_fits, exit_code, run
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload
from pagewire.cli import client_flags, figures
from pagewire.client.client import AsyncClient
from pagewire.client.server_info import ServerInfo
from pagewire.hosting import local_server
from pagewire.progress import Progress

_INTEGERS: flags.Integers = {
    "--num-prompts": (client_flags.count, 1000, "number of requests"),
    "--random-prefix-len": (client_flags.count_or_zero, 0, "tokens that all prompts share at their beginning"),
    # The default is more than a step can batch, and less than the limit of a server's waiting queue.
    "--max-concurrency": (client_flags.count, 1024, "most requests at the same time"),
    "--num-warmups": (client_flags.count_or_zero, 0, "number of unmeasured requests to send first"),
}


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of a throughput benchmark.

    The token counts include the tokens that interrupted requests received. They include no tokens of failed requests.
    """

    duration: float  # in seconds
    completed: int
    failed: int
    num_prompt_tokens: int
    num_output_tokens: int

    def rate(self, count: int) -> float:
        """Return a count divided by the duration of the run, which is a rate per second. Return 0 if nothing was
        measured."""
        return count / self.duration if self.duration > 0 else 0.0


def main(arguments: Sequence[str]) -> int:
    own, serve_flags = local_server.split_serve_flags(arguments)
    description = "Measure the throughput for many requests that are sent at once."
    parser = flags.bench_parser("throughput", description, _INTEGERS, input_len=1024, output_len=128)
    parser.add_argument(
        "--random-range-ratio",
        type=flags.range_ratio,
        default=flags.RangeRatio(0.0, 0.0),
        metavar="RATIO",
        help='draw lengths from LEN * (1 - RATIO) to LEN * (1 + RATIO); {"input": RATIO, "output": RATIO} for separate '
        "ratios (default: 0)",
    )
    parsed = parser.parse_args(own)
    path = result.path_of(parser, parsed)
    with target.opened(parser, parsed, serve_flags) as client:
        info, measured = asyncio.run(_measure(parsed, client))
    totals = total(measured)
    print(report(totals), flush=True)
    if path is not None:
        result.write(path, result.figures("throughput", info, measured, _figures(parsed, totals)))
    return exit_code(measured)


def total(measured: Run) -> Totals:
    served = [record for record in measured.records if record.error is None]
    return Totals(
        duration=measured.duration,
        completed=sum(record.is_finished for record in served),
        failed=len(measured.records) - len(served),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in served if record.arrivals),
        num_output_tokens=sum(record.num_output_tokens for record in served),
    )


def report(totals: Totals) -> str:
    all_tokens = totals.num_prompt_tokens + totals.num_output_tokens
    return (
        f"Throughput: {figures.rounded(totals.rate(totals.completed))} requests/s, "
        f"{figures.rounded(totals.rate(all_tokens))} total tokens/s, "
        f"{figures.rounded(totals.rate(totals.num_output_tokens))} output tokens/s\n"
        f"Total num prompt tokens:  {totals.num_prompt_tokens}\n"
        f"Total num output tokens:  {totals.num_output_tokens}"
    )


def _figures(parsed: argparse.Namespace, totals: Totals) -> dict[str, Any]:
    all_tokens = totals.num_prompt_tokens + totals.num_output_tokens
    return {
        "num_prompts": parsed.num_prompts,
        "input_len": parsed.input_len,
        "output_len": parsed.output_len,
        "random_range_ratio": [parsed.random_range_ratio.input, parsed.random_range_ratio.output],
        "random_prefix_len": parsed.random_prefix_len,
        "seed": parsed.seed,
        "elapsed_time": totals.duration,
        "num_requests": totals.completed,
        "failed": totals.failed,
        "total_num_tokens": all_tokens,
        "total_output_tokens": totals.num_output_tokens,
        "requests_per_second": totals.rate(totals.completed),
        "tokens_per_second": totals.rate(all_tokens),
        "output_tokens_per_second": totals.rate(totals.num_output_tokens),
    }


async def _measure(parsed: argparse.Namespace, client: AsyncClient) -> tuple[ServerInfo, Run]:
    """Send the warm-up requests of the throughput benchmark, then the measured requests. Return the server's
    information and the timing of the measured requests.

    Raise CommandError if a request could exceed the server's context length.
    """
    ratio: flags.RangeRatio = parsed.random_range_ratio
    workload = Workload(
        num_prompts=parsed.num_prompts,
        input_len=LengthRange.around(parsed.input_len, ratio.input),
        output_len=LengthRange.around(parsed.output_len, ratio.output),
        prefix_len=parsed.random_prefix_len,
        seed=parsed.seed,
    )

    async def send(requests: Sequence[PlannedRequest], title: str) -> Run:
        line = Progress(len(requests), None if parsed.disable_tqdm else sys.stderr, title=title)
        sent = await run(client, requests, flags.sampling(parsed), line, max_concurrency=parsed.max_concurrency)
        line.close()
        return sent

    async with client:
        info = await client.info()
        check_fits(workload, info)
        if parsed.num_warmups:
            warm_ups = replace(workload, num_prompts=parsed.num_warmups).requests(info.vocab_size)
            if (warmed := await send(warm_ups, "throughput (warming up)")).was_interrupted:
                return info, replace(warmed, records=(), duration=0.0)
        return info, await send(workload.requests(info.vocab_size), "throughput")
