"""The benchmarks of many requests: `throughput`, with all there at once, and `serve`, where they arrive over time."""

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.bench import flags, result, target
from pagewire.bench.result import Measured
from pagewire.bench.run import LoadTest, Run, exit_code, put
from pagewire.bench.statistics import ServingMetrics, measure
from pagewire.bench.workload import LengthRange, Workload
from pagewire.cli import client_flags, connection
from pagewire.hosting import local_server
from pagewire.options import Parser
from pagewire.sampling_params import SamplingParams

# More than a step takes, fewer than a server lets wait.
MAX_CONCURRENCY = 1024
DEFAULT_LATENCIES = ["ttft", "tpot", "itl"]


def throughput(arguments: Sequence[str]) -> int:
    """Measures how many tokens per second a server makes of requests that are all there at once."""
    own, serve_flags = local_server.split_serve_flags(arguments)
    parser = _throughput_parser()
    parsed = parser.parse_args(own)
    path = result.path_of(parser, parsed, "pagewire-throughput")
    result.check_chart(parser, parsed.chart)
    with target.opened(parser, parsed, serve_flags) as client:
        info, measured = asyncio.run(put(_load("throughput", parsed, flags.sampling(parsed)), client))
    metrics = measure(measured, [99.0], {})
    print(throughput_report(metrics), flush=True)
    figures = {
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
    return _end("throughput", parsed, path, Measured.pagewire(info), measured, figures, "")


def throughput_report(metrics: ServingMetrics) -> str:
    return (
        f"Throughput: {metrics.request_throughput:.2f} requests/s, "
        f"{metrics.total_token_throughput:.2f} total tokens/s, {metrics.output_throughput:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {metrics.total_input_tokens}\n"
        f"Total num output tokens:  {metrics.total_output_tokens}"
    )


def _throughput_parser() -> Parser:
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
        type=client_flags.count,
        default=MAX_CONCURRENCY,
        metavar="INT",
        help=f"most requests at the same time (default: {MAX_CONCURRENCY})",
    )
    parser.add_argument(
        "--num-warmups",
        type=client_flags.count_or_zero,
        default=0,
        metavar="INT",
        help="number of unmeasured requests to send first (default: 0)",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    result.add_flags(parser, with_output_json=True)
    # All at once.
    parser.set_defaults(request_rate=math.inf, burstiness=1.0, request_id_prefix=None)
    return parser


def serve(arguments: Sequence[str]) -> int:
    """Measures what clients of a running server see while requests arrive by themselves."""
    parser = _serve_parser()
    parsed = parser.parse_args(arguments)
    target.check(parser, parsed)
    objectives = flags.objectives(parser, parsed.goodput)
    rate = result.rate_text(parsed.request_rate)
    concurrency = "" if parsed.max_concurrency is None else f"-concurrency{parsed.max_concurrency}"
    path = result.path_of(parser, parsed, f"pagewire-{rate}qps{concurrency}")
    result.check_chart(parser, parsed.chart)
    sampling = replace(flags.sampling(parsed), ignore_eos=parsed.ignore_eos or parsed.dataset_name == "random")
    of, measured = asyncio.run(target.measure(parser, parsed, _load("serve", parsed, sampling)))
    metrics = measure(measured, parsed.metric_percentiles, objectives)
    print(
        result.serving_table(
            metrics,
            latencies=parsed.percentile_metrics,
            max_concurrency=parsed.max_concurrency,
            request_rate=None if math.isinf(parsed.request_rate) else parsed.request_rate,
            was_interrupted=measured.was_interrupted,
        ),
        flush=True,
    )
    arrival = " all at once" if rate == "inf" else f" {rate} a second"
    return _end("serve", parsed, path, of, measured, _serve_figures(parsed, metrics), arrival)


def _serve_figures(parsed: argparse.Namespace, metrics: ServingMetrics) -> dict[str, Any]:
    return {
        "tokenizer_id": parsed.tokenizer or parsed.model,
        "dataset_name": parsed.dataset_name,
        "dataset_path": parsed.dataset_path,
        "num_prompts": parsed.num_prompts,
        "request_rate": result.rate_text(parsed.request_rate),
        "burstiness": result.rate_text(parsed.burstiness),
        "max_concurrency": parsed.max_concurrency,
        "input_len": parsed.input_len,
        "output_len": parsed.output_len,
        "random_range_ratio": [parsed.random_range_ratio.input, parsed.random_range_ratio.output],
        "random_prefix_len": parsed.random_prefix_len,
        "seed": parsed.seed,
        "goodput": parsed.goodput,
        **result.serving_figures(metrics),
    }


def _serve_parser() -> Parser:
    parser = Parser(
        prog="pagewire bench serve",
        usage="pagewire bench serve [flags]",
        description="Send requests to a running server as they would arrive in practice, and measure what clients see.",
    )
    target.add_serving_flags(parser)
    connection.add_flags(parser, without_url=f"${connection.URL_VARIABLE}, or {connection.DEFAULT_URL}")
    target.add_dataset_flags(parser)
    flags.add_range_flags(parser, num_prompts=1000)
    flags.add_length_flags(parser, input_len=1024, output_len=128)
    flags.add_sampling_flags(parser, temperature=None)
    _add_arrival_flags(parser)
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep to these times in milliseconds: ttft, tpot, e2el",
    )
    group.add_argument(
        "--percentile-metrics",
        type=client_flags.names_among(result.LATENCIES),
        default=DEFAULT_LATENCIES,
        metavar="NAMES",
        help="latencies to show: ttft, tpot, itl, e2el (default: ttft,tpot,itl)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=flags.percents,
        default=[99.0],
        metavar="LIST",
        help="percentiles to show (default: 99)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    result.add_flags(parser, with_output_json=False)
    return parser


def _add_arrival_flags(parser: Parser) -> None:
    group = parser.add_argument_group("arrival")
    group.add_argument(
        "--request-rate",
        type=client_flags.positive,
        default=math.inf,
        metavar="RATE",
        help="requests per second; inf sends all at once (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=client_flags.positive,
        default=1.0,
        metavar="FLOAT",
        help="how evenly requests arrive: 1 is a Poisson process, below 1 is burstier, inf is a fixed rate (default: "
        "1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=client_flags.count,
        metavar="INT",
        help="most requests at the same time; others wait on the client (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=client_flags.count_or_zero,
        default=0,
        metavar="INT",
        help="number of unmeasured requests to send first (default: 0)",
    )
    group.add_argument(
        "--request-id-prefix", metavar="TEXT", help="begin request ids with this (default: the server chooses ids)"
    )


def _load(verb: str, parsed: argparse.Namespace, sampling: SamplingParams) -> LoadTest:
    ratio: flags.RangeRatio = parsed.random_range_ratio
    workload = Workload(
        num_prompts=parsed.num_prompts,
        input_len=LengthRange.around(parsed.input_len, ratio.input),
        output_len=LengthRange.around(parsed.output_len, ratio.output),
        prefix_len=parsed.random_prefix_len,
        request_rate=parsed.request_rate,
        burstiness=parsed.burstiness,
        seed=parsed.seed,
    )
    return LoadTest(
        name=verb,
        workload=workload,
        sampling=sampling,
        max_concurrency=parsed.max_concurrency,
        num_warmups=parsed.num_warmups,
        request_id_prefix=parsed.request_id_prefix,
        shows_progress=not parsed.disable_tqdm,
    )


def _end(
    verb: str,
    parsed: argparse.Namespace,
    path: Path | None,
    of: Measured,
    measured: Run,
    own: Mapping[str, Any],
    arrival: str,
) -> int:
    """Writes the figures and draws the chart that the flags ask for, and returns the exit code."""
    if path is not None:
        result.write(path, result.figures(verb, of, parsed, measured, own))
    if parsed.chart is not None:
        load = f"{parsed.num_prompts} requests{arrival}, {parsed.input_len} tokens in, {parsed.output_len} out"
        result.draw_run(parsed.chart, f"{of.model}, {load}", measured)
    return exit_code(measured)
