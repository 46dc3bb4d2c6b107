"""Limits on the sampling options of requests, by their names in the public proto.

Some limits apply to one number, and others to combinations of options. `SamplingParams`, requests on the wire and
generation_config.json are all checked against these rules. The server checks limits that depend on the model or the
prompt.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagewire.common.wire.messages import GrammarKind, SamplingParams

# The options that a request sets.
Options = Mapping[str, Any]


class Fault(NamedTuple):
    """An error in a request's sampling options: the option with the invalid value, such as `stop[3]`, and a text that
    gives the reason.
    """

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Range:
    """The range of valid values of a sampling option, from `low` to `high`. The bounds are inclusive, except `low` if
    `excludes_low` is set.
    """

    low: int
    high: float = math.inf
    excludes_low: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a value is in the range. NaN is in no range."""
        return self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def faults(self, field: str, value: float) -> Iterator[Fault]:
        """Yield a fault with an error message if the value of a sampling option is out of range."""
        if not self.holds(value):
            # The wire's float32 turns 0.1 into 0.10000000149.
            is_short = isinstance(value, float) and not self.holds(float(f"{value:g}"))
            yield Fault(field, f"{field} is {f'{value:g}' if is_short else value}, but must be {self}")

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.excludes_low else f"{self.low} to {self.high}"


MAX_SAMPLES = 16
UINT32, UINT64 = Range(0, 2**32 - 1), Range(0, 2**64 - 1)
# The options that are a number of log-probabilities, and the number that stands for all tokens of the vocabulary.
LOGPROB_NUMBERS, ALL_TOKENS = ("logprobs", "prompt_logprobs"), -1
LOGPROBS = Range(ALL_TOKENS, 20)
LOGIT_BIAS = Range(-100, 100)
# The options that restrict a random choice: first those that other APIs and traces have under the same names, then all.
COMMON_FILTERS = {"temperature": Range(0, 100), "top_k": UINT32, "top_p": Range(0, 1, excludes_low=True)}
_FILTERS = {**COMMON_FILTERS, "min_p": Range(0, 1)}
RANGES = {
    "beam_width": Range(1, 16),
    "n": Range(1, MAX_SAMPLES),
    **_FILTERS,
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    "max_tokens": Range(1),
    "min_tokens": UINT32,
    "seed": UINT64,
    **dict.fromkeys(LOGPROB_NUMBERS, LOGPROBS),
}
MAX_STOP_TEXT_CHARS = 256
MAX_GRAMMAR_BYTES = 512 * 1024  # of UTF-8
# An entry of a choice has at least one character, two quotes and a comma.
MAX_ENTRIES = {
    "stop": 16,
    "stop_token_ids": 64,
    "logit_bias": 1024,
    "logprob_token_ids": 128,
    "choice": MAX_GRAMMAR_BYTES // 4,
}
# The values that turn the filters off. A beam search uses these values, because it makes no random choice.
FILTERS_OFF = {name: getattr(SamplingParams(), name) for name in _FILTERS}
# The options whose defaults a checkpoint may set, by their names in generation_config.json.
CHECKPOINTS_OPTIONS = (*FILTERS_OFF, "repetition_penalty")


def faults_in(options: Options) -> Iterator[Fault]:
    """Yield the faults in a request's sampling options that do not depend on the model or the prompt. The types of the
    values must have been checked before.
    """
    for field, legal in RANGES.items():
        if field in options:
            yield from legal.faults(field, options[field])
    for field, limit in MAX_ENTRIES.items():
        if (count := len(options.get(field, ()))) > limit:
            yield Fault(field, f"{field} has {count} entries, at most {limit} are allowed; send fewer")
    yield from faults_of_min_tokens(options)
    yield from _faults_of_beams(options)
    yield from _faults_of_grammar(options)
    for token_id, bias in options.get("logit_bias", {}).items():
        yield from LOGIT_BIAS.faults(f"logit_bias[{token_id}]", bias)
    for position, text in enumerate(options.get("stop", ())):
        if not 1 <= len(text) <= MAX_STOP_TEXT_CHARS:
            field = f"stop[{position}]"
            yield Fault(field, f"{field} has {len(text)} characters, but must have 1 to {MAX_STOP_TEXT_CHARS}")


def faults_of_min_tokens(options: Options) -> Iterator[Fault]:
    min_tokens, max_tokens = options.get("min_tokens", 0), options.get("max_tokens", math.inf)
    if min_tokens > max_tokens:
        yield Fault(
            "min_tokens",
            f"min_tokens is {min_tokens}, but the output has at most {max_tokens} tokens; lower min_tokens",
        )


def _faults_of_beams(options: Options) -> Iterator[Fault]:
    if "beam_width" not in options:
        for field in ("length_penalty", "early_stopping"):
            if field in options:
                told = "but without beam_width there is no beam search; set beam_width too"
                yield Fault(field, f"{field} is set, {told}")
        return
    n, beam_width, length_penalty = options.get("n", 1), options["beam_width"], options.get("length_penalty", 1.0)
    if n > beam_width:
        yield Fault("n", f"n is {n}, but must be at most the beam_width of {beam_width}; lower n or raise beam_width")
    if not abs(length_penalty) < math.inf:
        yield Fault("length_penalty", f"length_penalty is {length_penalty:g}, but must be a finite number")
    for field, off in FILTERS_OFF.items():
        if (value := options.get(field, off)) != off:
            told = "but beam search makes no random choices"
            yield Fault(field, f"{field} is {float(value):g}, {told}; leave {field} or beam_width unset")
    for field in (*LOGPROB_NUMBERS, "logprob_token_ids"):
        if field in options:
            told = f"leave {field} unset, or sample without beam_width"
            yield Fault(field, f"{field} is set, but beam search does not support it; {told}")
    if options.get("stop"):
        yield Fault(
            "stop", "stop is set, but beam search has no stop texts; use stop_token_ids, or sample without beam_width"
        )


def grammar_kind(options: Options) -> GrammarKind | None:
    """Return the kind of the grammar that a request's output must match, or None. Each kind has an option whose name is
    the kind's name in lower case.
    """
    return next((kind for kind in GrammarKind if kind.name.lower() in options), None)


def grammar_text(options: Options, kind: GrammarKind) -> str:
    """Return the text of the grammar that a request's output must match. The text is empty for the kind JSON_OBJECT,
    which allows any JSON object.
    """
    value: Any = options[kind.name.lower()]
    return json.dumps(value, ensure_ascii=False) if kind is GrammarKind.CHOICE else "" if value is True else value


def _faults_of_grammar(options: Options) -> Iterator[Fault]:
    kind = grammar_kind(options)
    if kind is None:
        return
    name = kind.name.lower()
    value = options[name]
    if value is False:
        yield Fault(name, "json_object is false, but must be true or unset")
    elif not value:
        yield Fault(name, f"{name} is empty; specify what the output must match, or leave it unset")
    else:
        yield from faults_of_grammar_text(name, grammar_text(options, kind))


def faults_of_grammar_text(name: str, text: str) -> Iterator[Fault]:
    """Yield a fault if the text of a request's grammar is too long. `name` is the name of the option that has the
    grammar.
    """
    # Unpaired surrogates cannot be sent. The code that builds messages reports them.
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_GRAMMAR_BYTES:
        yield Fault(name, f"{name} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; shorten it")
