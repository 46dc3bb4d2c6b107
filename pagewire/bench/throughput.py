"""`pagewire bench throughput` measures how many tokens per second a server makes of requests that are all there at
once."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from pagewire.bench import chart, flags, result, target
from pagewire.bench.run import LoadTest, Run, exit_code, put
from pagewire.bench.statistics import ServingMetrics, measure
from pagewire.bench.workload import Workload
from pagewire.cli.flags import count, count_or_zero
from pagewire.hosting import local_server
from pagewire.options import Parser
from pagewire.server import ServerInfo

# More than a step takes, fewer than a server lets wait.
MAX_CONCURRENCY = 1024


def main(arguments: Sequence[str]) -> int:
    own, serve_flags = local_server.split_serve_flags(arguments)
    parser = _parser()
    parsed = parser.parse_args(own)
    path = result.path_of(parser, parsed, "pagewire-throughput")
    chart.check(parser, parsed.chart)
    with target.opened(parser, parsed, serve_flags) as client:
        info, measured = asyncio.run(put(_load(parsed), client))
    metrics = measure(measured, [99.0], {})
    print(report(metrics), flush=True)
    if path is not None:
        result.write(path, _figures(parsed, info, measured, metrics))
    if parsed.chart is not None:
        text = f"{parsed.num_prompts} requests, {parsed.input_len} tokens in, {parsed.output_len} out"
        chart.draw_run(parsed.chart, f"{info.served_model_name}, {text}", measured)
    return exit_code(measured)


def report(metrics: ServingMetrics) -> str:
    return (
        f"Throughput: {metrics.request_throughput:.2f} requests/s, "
        f"{metrics.total_token_throughput:.2f} total tokens/s, {metrics.output_throughput:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {metrics.total_input_tokens}\n"
        f"Total num output tokens:  {metrics.total_output_tokens}"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="pagewire bench throughput",
        usage="pagewire bench throughput [flags]",
        description="Measure the throughput for many requests that are sent at once.",
    )
    target.add_flags(parser)
    flags.add_range_flags(parser, num_prompts=1000)
    flags.add_length_flags(parser, input_len=1024, output_len=128)
    flags.add_sampling_flags(parser, temperature=1.0)
    parser.add_argument(
        "--max-concurrency",
        type=count,
        default=MAX_CONCURRENCY,
        metavar="INT",
        help=f"most requests at the same time (default: {MAX_CONCURRENCY})",
    )
    parser.add_argument(
        "--num-warmups",
        type=count_or_zero,
        default=0,
        metavar="INT",
        help="number of unmeasured requests to send first (default: 0)",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    chart.add_flag(parser)
    result.add_flags(parser, with_output_json=True)
    return parser


def _load(parsed: argparse.Namespace) -> LoadTest:
    input_len, output_len = flags.length_ranges(parsed)
    return LoadTest(
        name="throughput",
        workload=Workload(parsed.num_prompts, input_len, output_len, parsed.random_prefix_len, seed=parsed.seed),
        sampling=flags.sampling(parsed),
        max_concurrency=parsed.max_concurrency,
        num_warmups=parsed.num_warmups,
        shows_progress=not parsed.disable_tqdm,
    )


def _figures(parsed: argparse.Namespace, info: ServerInfo, measured: Run, metrics: ServingMetrics) -> dict[str, Any]:
    own = {
        "num_prompts": parsed.num_prompts,
        "input_len": parsed.input_len,
        "output_len": parsed.output_len,
        "random_range_ratio": [parsed.random_range_ratio.input, parsed.random_range_ratio.output],
        "random_prefix_len": parsed.random_prefix_len,
        "seed": parsed.seed,
        "elapsed_time": metrics.duration,
        "num_requests": metrics.completed,
        "total_num_tokens": metrics.total_input_tokens + metrics.total_output_tokens,
        "requests_per_second": metrics.request_throughput,
        "tokens_per_second": metrics.total_token_throughput,
        **result.serving_figures(metrics),
    }
    return result.figures("throughput", result.Measured.pagewire(info), parsed, measured, own)
