"""The command line parsers of the bench verbs. The flags have the names of `vllm bench`."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagewire.bench import result, target
from pagewire.cli import client_flags
from pagewire.client.sampling_params import BENCH_FIELDS, BOOLEAN_FIELDS, FLAGS, SamplingParams
from pagewire.compatibility import FOREIGN_BENCH_FLAGS
from pagewire.options import Parser

# Maps the names of a flag to the parser of its value, its default and its help text.
Integers = Mapping[str, tuple[Callable[[str], int], int, str]]


@dataclass(frozen=True, slots=True)
class RangeRatio:
    """The relative spread of the random prompt lengths and output lengths of a benchmark workload. Each field is in [0,
    1). A spread of 0.2 draws lengths from 80% to 120% of the requested length."""

    input: float
    output: float


def range_ratio(text: str) -> RangeRatio:
    """Parse the command line flag for the spread of lengths, as vLLM does. The text is a number such as 0.5, or a JSON
    object {"input": 0.5, "output": 0}."""
    if not text.lstrip().startswith("{"):
        value = _ratio(text)
        return RangeRatio(value, value)
    try:
        parts = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object: {error}") from None
    if set(parts) != {"input", "output"}:
        raise argparse.ArgumentTypeError(f'{text} must have exactly the keys in {{"input": RATIO, "output": RATIO}}')
    return RangeRatio(_ratio(str(parts["input"])), _ratio(str(parts["output"])))


def bench_parser(verb: str, description: str, own: Integers, *, input_len: int, output_len: int) -> Parser:
    """Return the argument parser of a `pagewire bench` command. The parser has the integer flags `own` of this command,
    and the flags that all benchmarks share.

    `input_len` and `output_len` are the default prompt and output lengths in tokens.
    """
    parser = Parser(
        prog=f"pagewire bench {verb}",
        usage=f"pagewire bench {verb} [flags]",
        description=description,
        explained=FOREIGN_BENCH_FLAGS,
    )
    target.add_flags(parser)
    _add_integers(parser, own)
    requests: Integers = {
        "--input-len --random-input-len": (client_flags.count, input_len, "prompt tokens of each request"),
        "--output-len --random-output-len": (client_flags.count, output_len, "output tokens of each request"),
        "--seed": (int, 0, "seed of everything that is drawn at random"),
    }
    _add_integers(
        parser.add_argument_group("requests", "Prompts are random. Outputs always have their full length."),
        requests,
    )
    for name in BENCH_FIELDS:
        if name == "temperature":
            text = "randomness; 0 always selects the most likely token (default: 1)"
            client_flags.add_number_flag(parser, name, text, 1.0)
        else:
            client_flags.add_number_flag(parser, name, "as in `pagewire complete`")
    result.add_flags(parser)
    return parser


def _add_integers(group: argparse._ActionsContainer, integers: Integers) -> None:
    for names, (parse, default, text) in integers.items():
        group.add_argument(
            *names.split(), type=parse, default=default, metavar="INT", help=f"{text} (default: {default})"
        )


def sampling(parsed: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters for the requests of a benchmark, from the parsed command line flags.

    `ignore_eos` is set, so that each output has its full length. For parameters without a flag, the server's defaults
    apply.
    """
    left = {field.name: None for field in FLAGS if field.name not in (*BOOLEAN_FIELDS, "max_tokens")}
    return SamplingParams(**left | {name: getattr(parsed, name) for name in BENCH_FIELDS}, ignore_eos=True)


def _ratio(text: str) -> float:
    value = client_flags.number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value
