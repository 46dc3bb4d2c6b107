"""How tokens are chosen: vLLM's names and defaults."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from numbers import Integral, Real
from typing import TypedDict, Unpack

from pagewire.compatibility import SAMPLING_FIELDS, judge

INTEGER_FIELDS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "beam_width")
REAL_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
BOOLEAN_FIELDS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
# Names of when a beam search ends, and transformers' values for the same.
EARLY_STOPPING = ("heuristic", "first", "never", False, True)


class Default(float):
    """A number that stands where the user chose none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. The server checks ranges; here only types are checked (TypeError).

    None leaves a field to the server: the checkpoint's generation_config.json, then the default that the public
    proto names, which for `max_tokens` is as many tokens as fit. `top_k` takes 0 and -1 for off. `logprobs=k` asks for
    the chosen token's log-probability and those of the k most likely tokens.

    `beam_width` turns to beam search: the `n` best hypotheses come, best first, once the search has ended, each with
    its `cumulative_logprob`. A hypothesis scores cumulative_logprob / tokens ** `length_penalty`. `early_stopping` is
    "heuristic" (or False), "first" (or True) or "never", as in transformers. A temperature that was chosen and is not
    0 is refused.

    Of vLLM's fields those that Pagewire does not have are taken too: ignored with a warning or refused (ValueError),
    as `pagewire.compatibility` lists them.
    """

    n: int | None = 1
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    temperature: float | None = Default(1.0)
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = False
    max_tokens: int | None = 16
    min_tokens: int | None = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    logit_bias: Mapping[int, float] | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: str | bool | None = None
    detokenize: InitVar[object] = None
    spaces_between_special_tokens: InitVar[object] = None
    output_kind: InitVar[object] = None
    skip_reading_prefix_cache: InitVar[object] = None
    best_of: InitVar[object] = None
    use_beam_search: InitVar[object] = None
    bad_words: InitVar[object] = None
    allowed_token_ids: InitVar[object] = None
    logits_processors: InitVar[object] = None
    guided_decoding: InitVar[object] = None
    structured_outputs: InitVar[object] = None
    truncate_prompt_tokens: InitVar[object] = None
    extra_args: InitVar[object] = None

    def __post_init__(self, *foreign: object) -> None:
        for name, value in zip(SAMPLING_FIELDS, foreign, strict=True):
            judge(SAMPLING_FIELDS, name, value, stacklevel=3)
        for name in INTEGER_FIELDS:
            self._require(name, is_integer(getattr(self, name)), "an integer")
        for name in REAL_FIELDS:
            self._require(name, is_real(getattr(self, name)), "a number")
        for name in BOOLEAN_FIELDS:
            self._require(name, isinstance(getattr(self, name), bool), "a bool")
        stop, ids, bias = self.stop, self.stop_token_ids, self.logit_bias
        self._require("stop", is_list(stop, lambda text: isinstance(text, str)) or isinstance(stop, str), "texts")
        self._require("stop_token_ids", is_list(ids, is_integer), "a list of integers")
        is_bias = isinstance(bias, Mapping) and all(is_integer(i) and is_real(v) for i, v in bias.items())
        self._require("logit_bias", is_bias, "a mapping from token ids to numbers")
        is_known = isinstance(self.early_stopping, str | bool) and self.early_stopping in EARLY_STOPPING
        self._require("early_stopping", is_known, f"one of {', '.join(map(repr, EARLY_STOPPING))}")

    def updated(self, **changes: Unpack["SamplingFields"]) -> "SamplingParams":
        """The same with other values of some fields. TypeError for a name that is none."""
        for name in changes:
            if name not in SamplingFields.__annotations__:
                near = difflib.get_close_matches(name, SamplingFields.__annotations__, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"{name!r} is no sampling parameter and no other argument{hint}")
        return replace(self, **changes)

    def _require(self, name: str, holds: bool, kind: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds:
            raise TypeError(f"{name} must be {kind} or None, got {value!r}")


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_list(value: object, is_element: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_element, value))


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments of a request."""

    n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    logit_bias: Mapping[int, float] | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: str | bool | None


# What a request without sampling parameters asks for: the server's own choices.
UNSET = SamplingParams(**{field.name: None for field in fields(SamplingParams)})
