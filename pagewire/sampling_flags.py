"""The flags of the client verbs that become `SamplingParams`. What is not given is left to the server."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields

from pagewire.sampling import EARLY_STOPPING, SamplingParams

FLAGS: tuple[tuple[str, Callable[[str], object], str], ...] = (
    ("max_tokens", int, "output tokens at most (as many as fit)"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "choose among the most likely tokens whose probabilities add up to this"),
    ("top_k", int, "choose among this many most likely tokens; 0 is off"),
    ("min_p", float, "choose among tokens at least this times as likely as the likeliest"),
    ("presence_penalty", float, "taken off the logit of every token the output has"),
    ("frequency_penalty", float, "taken off once per time the output has the token"),
    ("repetition_penalty", float, "divides the logits of tokens in prompt or output"),
    ("seed", int, "equal seeds give equal samples"),
    ("min_tokens", int, "no end before this many output tokens"),
)
SWITCHES = (
    ("ignore_eos", "--ignore-eos", True, "end tokens do not end the output"),
    ("include_stop_str_in_output", "--include-stop-str-in-output", True, "keep the stop text that ended the output"),
    ("skip_special_tokens", "--no-skip-special-tokens", False, "show the text of special tokens"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field but the number of samples and the log-probabilities, which few verbs can show."""
    group = parser.add_argument_group("sampling", "What is not given takes the model's own default.")
    for name, value_type, text in FLAGS:
        group.add_argument(flag(name), type=value_type, metavar=value_type.__name__.upper(), help=text)
    for name, switch, value, text in SWITCHES:
        group.add_argument(switch, dest=name, action="store_const", const=value, help=text)
    group.add_argument("--stop", metavar="TEXT", action="append", help="a text that ends the output; may be repeated")
    group.add_argument("--stop-token-ids", metavar="IDS", type=token_ids, help="tokens that end the output: 1,2,3")
    group.add_argument("--logit-bias", metavar="ID=BIAS", type=_bias, action="append", help="added to a token's logit")


def add_sample_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `add_flags` leaves out."""
    parser.add_argument("--n", type=int, metavar="INT", help="samples of the prompt, or hypotheses (default: 1)")
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities, with the K likeliest (with --json)"
    )
    parser.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same for the prompt (with --json)")
    group = parser.add_argument_group("beam search", "Finds the --n likeliest outputs instead of drawing them.")
    group.add_argument("--beam-width", type=int, metavar="INT", help="beams, which turns to beam search")
    text = "hypotheses score log-probability / tokens ** this (default: 1)"
    group.add_argument("--length-penalty", type=float, metavar="FLOAT", help=text)
    choices = [name for name in EARLY_STOPPING if isinstance(name, str)]
    group.add_argument("--early-stopping", choices=choices, help="when the search ends (default: heuristic)")


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags give; None for all others."""
    given = {field.name: getattr(arguments, field.name, None) for field in fields(SamplingParams)}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def token_ids(text: str) -> Sequence[int]:
    """Parses "1,2,3"."""
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
