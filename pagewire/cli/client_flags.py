"""The flags of the client verbs: number parsers, and the flags that set fields of `SamplingParams`.

Fields without a flag on the command line are left to the server.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagewire.client.errors import CommandError, InvalidRequest
from pagewire.client.sampling_params import (
    BOOLEAN_FIELDS,
    EARLY_STOPPING,
    FLAGS,
    INTEGER_FIELDS,
    STRUCTURES,
    UNSET,
    SamplingParams,
    StructuredOutputs,
)
from pagewire.common.option_limits import flag
from pagewire.compatibility import suggestion

# The sampling parameters that `add_flags` has flags for.
OPTIONS = (*(field.name for field in FLAGS), "stop", "stop_token_ids", "logit_bias", "structured_outputs")


def count(text: str) -> int:
    """Parse the value of a command line flag as an integer of at least 1."""
    return _integer(text, 1)


def count_or_zero(text: str) -> int:
    """Parse the value of a command line flag as an integer of at least 0."""
    return _integer(text, 0)


def number(text: str) -> float:
    """Parse the value of a command line flag as a number. Infinity, written "inf", is accepted, but NaN is not."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def positive(text: str) -> float:
    """Parse the value of a command line flag as a number above 0, which may be "inf"."""
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def sampled(name: str) -> Callable[[str], float]:
    """Return a function that parses a command line flag for the sampling parameter `name`. The function accepts the
    numbers that this field of `SamplingParams` accepts."""

    def parse(text: str) -> float:
        value = _whole(text) if name in INTEGER_FIELDS else number(text)
        given: Any = {name: value}
        try:
            UNSET.updated(**given)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _integer(text: str, minimum: int) -> int:
    value = _whole(text)
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
    return value


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that parses a comma-separated list of names from a command line flag. Every name must be in
    `known`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                among = ", ".join(known)
                raise argparse.ArgumentTypeError(f"{name!r} is none of {among}{suggestion(name, known)}")
        return names

    return parse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command line flags of all sampling parameters, except for the number of samples and the
    log-probabilities.

    `add_sample_flags` adds these other flags, since few commands can show several samples or log-probabilities.
    """
    group = parser.add_argument_group("sampling", "Parameters that are not given have the model's own defaults.")
    for field in FLAGS:
        if field.name in BOOLEAN_FIELDS:
            switch = flag(f"no_{field.name}" if field.default else field.name)
            value = not field.default
            group.add_argument(switch, dest=field.name, action="store_const", const=value, help=field.metadata["help"])
        else:
            add_number_flag(group, field.name, field.metadata["help"])
    group.add_argument("--stop", metavar="TEXT", action="append", help="end the output at this text; can be repeated")
    group.add_argument(
        "--stop-token-ids", metavar="IDS", type=token_ids, help="end the output at one of these tokens: 1,2,3"
    )
    group.add_argument(
        "--logit-bias",
        metavar="ID=BIAS",
        type=_bias,
        action="append",
        help="add BIAS to the logit of token ID; can be repeated",
    )
    _add_structured_output_flags(parser)


def add_number_flag(
    parser: argparse._ActionsContainer, name: str, help_text: str, default: float | None = None
) -> None:
    metavar = "INT" if name in INTEGER_FIELDS else "FLOAT"
    parser.add_argument(flag(name), type=sampled(name), metavar=metavar, default=default, help=help_text)


def add_sample_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command line flags for several samples, log-probabilities and beam search to a parser."""
    parser.add_argument("--n", type=sampled("n"), metavar="INT", help="how many outputs to generate (default: 1)")
    parser.add_argument(
        "--logprobs",
        type=sampled("logprobs"),
        metavar="K",
        help="with --json: log-probabilities of the output, and of the K most likely tokens",
    )
    parser.add_argument(
        "--prompt-logprobs", type=sampled("prompt_logprobs"), metavar="K", help="the same for the prompt"
    )
    group = parser.add_argument_group("beam search", "Find the --n most likely outputs instead of sampling them.")
    group.add_argument(
        "--beam-width", type=sampled("beam_width"), metavar="INT", help="number of beams; turns beam search on"
    )
    group.add_argument(
        "--length-penalty",
        type=number,
        metavar="FLOAT",
        help="scores are log-probability / length ** this; above 1 favours longer outputs (default: 1)",
    )
    choices = [name for name in EARLY_STOPPING if isinstance(name, str)]
    group.add_argument("--early-stopping", choices=choices, help="when the search ends (default: heuristic)")


def _add_structured_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command line flags for structured output, such as a JSON Schema, to a parser. A user may give at most one
    of these flags."""
    section = parser.add_argument_group("structured output", "A constraint on every output. At most one can be given.")
    group = section.add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", type=text_of, help="a JSON Schema")
    group.add_argument("--json-object", action="store_const", const=True, help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="a regular expression, for the whole output")
    group.add_argument("--choice", metavar="A,B", type=_choice, help="one of these texts, separated by commas")
    group.add_argument("--grammar", metavar="FILE", type=text_of, help="a context-free grammar in Lark or EBNF")
    group.add_argument("--structural-tag", metavar="FILE", type=text_of, help="a structural tag, in JSON")


def _structured_outputs(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """Return the structured output constraint in the parsed command line flags, or None if no constraint was given."""
    given = {kind: getattr(arguments, "json_schema" if kind == "json" else kind, None) for kind in STRUCTURES}
    return None if set(given.values()) == {None} else StructuredOutputs(**given)


def text_of(path: str) -> str:
    """Read the UTF-8 file that a command line flag names, and return its content."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"cannot read {path}: it is not UTF-8") from None


def _choice(text: str) -> tuple[str, ...]:
    """Parse the value of a command line flag as a comma-separated list of non-empty texts."""
    texts = tuple(text.split(","))
    if not all(texts):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty text; give texts separated by commas, such as yes,no")
    return texts


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters in the parsed command line flags. Parameters that were not given are None."""
    given = {field.name: getattr(arguments, field.name, None) for field in fields(SamplingParams)}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    given["structured_outputs"] = _structured_outputs(arguments)
    return SamplingParams(**given)


def updated(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Return a copy of the sampling parameters with new values, which have the types of JSON. None resets a parameter.

    Raise CommandError for an invalid value, and for a name that is not in `OPTIONS`.
    """
    for name in changes.keys() - {*OPTIONS}:
        near = suggestion(name, OPTIONS) or f"; the options are {', '.join(OPTIONS)}"
        raise CommandError(f"there is no option {name!r}{near}")
    try:
        if isinstance(biases := changes.get("logit_bias"), dict):
            changes = {**changes, "logit_bias": {int(token_id): bias for token_id, bias in biases.items()}}
        return sampling.updated(**changes)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None


def token_ids(text: str) -> Sequence[int]:
    """Parse the value of a command line flag as a list of token ids, such as "1,2,3"."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        parsed = int(token_id), float(bias)
        UNSET.updated(logit_bias=dict([parsed]))
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bias such as 42=-1.5") from None
    return parsed
