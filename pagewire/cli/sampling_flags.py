"""The flags of the client verbs that become `SamplingParams`. What is not given is left to the server."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pagewire.sampling import BOOLEAN_FIELDS, EARLY_STOPPING, FLAGS, INTEGER_FIELDS, SamplingParams
from pagewire.structured_outputs import KINDS, StructuredOutputs
from pagewire.transport.option_limits import flag


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field but the number of samples and the log-probabilities, which few verbs can show."""
    group = parser.add_argument_group("sampling", "Whatever is not given takes the model's own default.")
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


def add_number_flag(
    parser: argparse._ActionsContainer, name: str, help_text: str, default: float | None = None
) -> None:
    value_type = int if name in INTEGER_FIELDS else float
    parser.add_argument(
        flag(name), type=value_type, metavar=value_type.__name__.upper(), default=default, help=help_text
    )


def add_sample_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `add_flags` leaves out."""
    parser.add_argument("--n", type=int, metavar="INT", help="how many outputs to generate (default: 1)")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="with --json: log-probabilities of the output, and of the K most likely tokens",
    )
    parser.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt")
    group = parser.add_argument_group("beam search", "Find the --n most likely outputs instead of sampling them.")
    group.add_argument("--beam-width", type=int, metavar="INT", help="number of beams; turns beam search on")
    group.add_argument(
        "--length-penalty",
        type=float,
        metavar="FLOAT",
        help="scores are log-probability / length ** this; above 1 favours longer outputs (default: 1)",
    )
    _add_structured_output_flags(parser)
    choices = [name for name in EARLY_STOPPING if isinstance(name, str)]
    group.add_argument("--early-stopping", choices=choices, help="when the search ends (default: heuristic)")


def _add_structured_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags of which one says what the outputs must match."""
    group = parser.add_argument_group("structured output", "What the output must match; one of these.")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("--json-schema", metavar="FILE", type=_file, help="a JSON Schema")
    choice.add_argument("--json-object", action="store_const", const=True, help="any JSON object")
    choice.add_argument("--regex", metavar="REGEX", help="a regular expression that the whole output matches")
    choice.add_argument("--choice", metavar="A,B", type=lambda text: text.split(","), help="one of these texts")
    choice.add_argument("--grammar", metavar="FILE", type=_file, help="a context-free grammar, as Lark or EBNF")


def _file(path: str) -> str:
    """Reads a file. Raises ArgumentTypeError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from None


def _structured_outputs(arguments: argparse.Namespace) -> StructuredOutputs | None:
    flags = {"json": "json_schema", **{kind: kind for kind in KINDS if kind not in ("json", "structural_tag")}}
    given = {kind: getattr(arguments, name, None) for kind, name in flags.items()}
    return StructuredOutputs(**given) if any(value is not None for value in given.values()) else None


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """Returns the parameters that the flags give, and None for all others."""
    given = {field.name: getattr(arguments, field.name, None) for field in fields(SamplingParams)}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    given["structured_outputs"] = _structured_outputs(arguments)
    return SamplingParams(**given)


def token_ids(text: str) -> Sequence[int]:
    """Parses "1,2,3", a list of token ids."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias such as 42=-1.5") from None
