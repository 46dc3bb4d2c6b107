"""Parses the values of the bench verbs' flags, and adds those that several verbs have. Names are those of `vllm
bench`.
"""

import argparse
import json
from dataclasses import dataclass

from pagewire.cli import client_flags
from pagewire.sampling_params import BENCH_FIELDS, BOOLEAN_FIELDS, FLAGS, SamplingParams


@dataclass(frozen=True, slots=True)
class RangeRatio:
    """How far lengths are spread about the one asked for, in [0, 1)."""

    input: float
    output: float


def range_ratio(text: str) -> RangeRatio:
    """Parses 0.5, or {"input": 0.5, "output": 0}, as vLLM takes it."""
    if not text.lstrip().startswith("{"):
        value = _ratio(text)
        return RangeRatio(value, value)
    try:
        parts = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON object: {error}") from None
    if set(parts) != {"input", "output"}:
        raise argparse.ArgumentTypeError(f'{text} has other keys than {{"input": RATIO, "output": RATIO}}')
    return RangeRatio(_ratio(str(parts["input"])), _ratio(str(parts["output"])))


def add_length_flags(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    group = parser.add_argument_group("requests", "Of random prompts, whose outputs always have their full length.")
    for name, default, text in (("input", input_len, "prompt"), ("output", output_len, "output")):
        group.add_argument(
            f"--{name}-len",
            f"--random-{name}-len",
            type=client_flags.count,
            default=default,
            metavar="INT",
            help=f"{text} tokens of each request (default: {default})",
        )
    group.add_argument(
        "--seed", type=int, default=0, metavar="INT", help="seed of everything that is drawn at random (default: 0)"
    )


def add_range_flags(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    parser.add_argument(
        "--num-prompts",
        type=client_flags.count,
        default=num_prompts,
        metavar="INT",
        help=f"number of requests (default: {num_prompts})",
    )
    parser.add_argument(
        "--random-range-ratio",
        type=range_ratio,
        default=RangeRatio(0.0, 0.0),
        metavar="RATIO",
        help='draw lengths from LEN * (1 - RATIO) to LEN * (1 + RATIO); {"input": RATIO, "output": RATIO} for separate '
        "ratios (default: 0)",
    )
    parser.add_argument(
        "--random-prefix-len",
        type=client_flags.count_or_zero,
        default=0,
        metavar="INT",
        help="number of tokens that all prompts share at their beginning (default: 0)",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    for name in BENCH_FIELDS:
        if name == "temperature":
            text = "randomness; 0 always takes the most likely token (default: 1)"
            client_flags.add_number_flag(parser, name, text, 1.0)
        else:
            client_flags.add_number_flag(parser, name, "as in `pagewire complete`")


def sampling(parsed: argparse.Namespace) -> SamplingParams:
    """Returns the parameters that the flags give, without an end but the length. The server chooses all others."""
    left = {field.name: None for field in FLAGS if field.name not in (*BOOLEAN_FIELDS, "max_tokens")}
    return SamplingParams(**left | {name: getattr(parsed, name) for name in BENCH_FIELDS}, ignore_eos=True)


def _ratio(text: str) -> float:
    value = client_flags.number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value
