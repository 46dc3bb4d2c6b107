"""`pagewire bench serve` measures what clients of a running server see while requests arrive by themselves."""

import argparse
import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagewire.bench import chart, flags, result, serving_target
from pagewire.bench.result import Measured
from pagewire.bench.run import LoadTest, Run, exit_code
from pagewire.bench.statistics import ServingMetrics, measure
from pagewire.bench.workload import Workload
from pagewire.cli import connection
from pagewire.cli.flags import count, count_or_zero, names_among, positive
from pagewire.options import Parser

DEFAULT_LATENCIES = ["ttft", "tpot", "itl"]


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    serving_target.check(parser, parsed)
    objectives = flags.objectives(parser, parsed.goodput)
    path = result.path_of(parser, parsed, _stem(parsed))
    chart.check(parser, parsed.chart)
    of, measured = asyncio.run(serving_target.measure(parser, parsed, _load(parsed)))
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
    if path is not None:
        result.write(path, _figures(parsed, of, measured, metrics))
    if parsed.chart is not None:
        chart.draw_run(parsed.chart, f"{of.model}, {_load_text(parsed)}", measured)
    return exit_code(measured)


def _parser() -> Parser:
    parser = Parser(
        prog="pagewire bench serve",
        usage="pagewire bench serve [flags]",
        description="Send requests to a running server as they would arrive in practice, and measure what clients see.",
    )
    serving_target.add_flags(parser)
    connection.add_flags(parser, without_url=f"${connection.URL_VARIABLE}, or {connection.DEFAULT_URL}")
    serving_target.add_dataset_flags(parser)
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
        type=names_among(result.LATENCIES),
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
    chart.add_flag(parser)
    result.add_flags(parser, with_output_json=False)
    return parser


def _add_arrival_flags(parser: Parser) -> None:
    group = parser.add_argument_group("arrival")
    group.add_argument(
        "--request-rate",
        type=positive,
        default=math.inf,
        metavar="RATE",
        help="requests per second; inf sends all at once (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="FLOAT",
        help="how evenly requests arrive: 1 is a Poisson process, below 1 is burstier, inf is a fixed rate (default: "
        "1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=count,
        metavar="INT",
        help="most requests at the same time; others wait on the client (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=count_or_zero,
        default=0,
        metavar="INT",
        help="number of unmeasured requests to send first (default: 0)",
    )
    group.add_argument(
        "--request-id-prefix", metavar="TEXT", help="begin request ids with this (default: the server chooses ids)"
    )


def _load(parsed: argparse.Namespace) -> LoadTest:
    input_len, output_len = flags.length_ranges(parsed)
    workload = Workload(
        num_prompts=parsed.num_prompts,
        input_len=input_len,
        output_len=output_len,
        prefix_len=parsed.random_prefix_len,
        request_rate=parsed.request_rate,
        burstiness=parsed.burstiness,
        seed=parsed.seed,
    )
    return LoadTest(
        name="serve",
        workload=workload,
        sampling=replace(flags.sampling(parsed), ignore_eos=parsed.ignore_eos or parsed.dataset_name == "random"),
        max_concurrency=parsed.max_concurrency,
        num_warmups=parsed.num_warmups,
        request_id_prefix=parsed.request_id_prefix,
        shows_progress=not parsed.disable_tqdm,
    )


def _figures(parsed: argparse.Namespace, of: Measured, measured: Run, metrics: ServingMetrics) -> dict[str, Any]:
    own = {
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
    return result.figures("serve", of, parsed, measured, own)


def _stem(parsed: argparse.Namespace) -> str:
    concurrency = "" if parsed.max_concurrency is None else f"-concurrency{parsed.max_concurrency}"
    return f"pagewire-{result.rate_text(parsed.request_rate)}qps{concurrency}"


def _load_text(parsed: argparse.Namespace) -> str:
    rate = result.rate_text(parsed.request_rate)
    arrival = "all at once" if rate == "inf" else f"{rate} a second"
    return f"{parsed.num_prompts} requests {arrival}, {parsed.input_len} tokens in, {parsed.output_len} out"
