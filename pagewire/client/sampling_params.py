"""The parameters by which tokens are chosen, with vLLM's names and defaults, and what an output must match."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, InitVar, dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, Unpack

from pagewire.client.arguments import is_integer, is_real, require
from pagewire.client.errors import InvalidRequest
from pagewire.common.wire.sampling_rules import faults_in
from pagewire.compatibility import SAMPLING_FIELDS, STRUCTURED_OUTPUTS_FIELDS, judge, suggestion

# Names of when a beam search ends, and transformers' values for the same.
EARLY_STOPPING = ("heuristic", "first", "never", False, True)
Value = TypeVar("Value")


class Default(float):
    """A number that stands where the user chose none."""


def _flag(default: Value, help_text: str, *, is_benched: bool = False) -> Value:
    """A field that the client verbs have a flag for, and the bench verbs too where it `is_benched`.

    The flag of a truth value turns the default into its opposite.
    """
    return field(default=default, metadata={"help": help_text, "is_benched": is_benched})


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What each output of a request must match: exactly one of these is given.

    Here types are checked alone (TypeError), and that there is one (ValueError). The server checks what it says.

    Attributes:
        json: A JSON Schema as a dict or as JSON, or a class with `model_json_schema()`, such as a pydantic model.
        regex: A regular expression that the whole output matches.
        choice: Texts, one of which the output is.
        grammar: A context-free grammar, in llguidance's variant of Lark or in EBNF.
        json_object: True for any JSON object.
        structural_tag: A structural tag as a dict or as JSON.

    Of vLLM's fields those that Pagewire does not have are taken too: ignored with a warning or refused (ValueError),
    as `pagewire.compatibility` lists them.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_fallback: InitVar[object] = None
    disable_any_whitespace: InitVar[object] = None
    disable_additional_properties: InitVar[object] = None
    whitespace_pattern: InitVar[object] = None

    def __post_init__(self, *foreign: object) -> None:
        judge(STRUCTURED_OUTPUTS_FIELDS, foreign, stacklevel=3)
        if callable(make_schema := getattr(self.json, "model_json_schema", None)):
            object.__setattr__(self, "json", make_schema())
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs take exactly one of {', '.join(STRUCTURES)}; got {' and '.join(given) or 'none'}"
            )
        is_legal, what = STRUCTURES[self.kind]
        require(self.kind, self._value, is_legal(self._value), what)
        self.option  # noqa: B018  # raises what JSON cannot write at the call, not when the request is sent

    @staticmethod
    def of(given: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """Returns what a dict of the same names says. Raises TypeError, ValueError."""
        if isinstance(given, StructuredOutputs):
            return given
        require("structured_outputs", given, isinstance(given, Mapping), "StructuredOutputs or a dict or None")
        names = (*STRUCTURES, *STRUCTURED_OUTPUTS_FIELDS)
        for name in given:
            if name not in names:
                hint = suggestion(str(name), names) or f"; there are {', '.join(STRUCTURES)}"
                raise TypeError(f"structured_outputs have no {name!r}{hint}")
        return StructuredOutputs(**given)

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)

    @property
    def option(self) -> tuple[str, Any]:
        """Its name in the public proto, and its value, a dict as JSON. Raises TypeError, ValueError."""
        name, value = "json_schema" if self.kind == "json" else self.kind, self._value
        if not isinstance(value, Mapping):
            return name, value
        try:
            return name, json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.kind} cannot be written as JSON: {error}") from None

    @property
    def _value(self) -> Any:
        return getattr(self, self.kind)


# vLLM's name, by which its users import the class.
StructuredOutputsParams = StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Types are checked at once (TypeError), and whatever hangs on parameters alone
    (InvalidRequest, which is a ValueError); what hangs on the model or the prompt the server checks.

    None leaves a field to the server: the checkpoint's generation_config.json, then the default that the public
    proto names, which for `max_tokens` is as many tokens as fit. `top_k` takes 0 and -1 for off. `logprobs=k` asks for
    the chosen token's log-probability and those of the k most likely tokens, -1 for those of all tokens, and
    `logprob_token_ids` for those of the given tokens instead.

    `beam_width` turns to beam search: the `n` best hypotheses come, best first, once the search has ended, each with
    its `cumulative_logprob`. A hypothesis scores cumulative_logprob / tokens ** `length_penalty`. `early_stopping` is
    "heuristic" (or False), "first" (or True) or "never", as in transformers. A temperature that was chosen and is not
    0 is refused.

    `structured_outputs` is what each output must match: `StructuredOutputs`, or a dict of its names.

    Of vLLM's fields those that Pagewire does not have are taken too: ignored with a warning or refused (ValueError),
    as `pagewire.compatibility` lists them.
    """

    n: int | None = 1
    max_tokens: int | None = _flag(16, "how many tokens to generate at most (default: as many as fit)")
    temperature: float | None = _flag(Default(1.0), "randomness; 0 always takes the most likely token", is_benched=True)
    top_p: float | None = _flag(
        1.0, "sample from the most likely tokens whose probabilities add up to this", is_benched=True
    )
    top_k: int | None = _flag(0, "sample from this many most likely tokens; 0 turns it off", is_benched=True)
    min_p: float | None = _flag(0.0, "sample from tokens whose probability is at least this fraction of the highest")
    presence_penalty: float | None = _flag(
        0.0, "subtracted from the logit of every token that is already in the output"
    )
    frequency_penalty: float | None = _flag(
        0.0, "subtracted from a token's logit for each time it is already in the output"
    )
    repetition_penalty: float | None = _flag(
        1.0, "makes tokens that are in the prompt or the output less likely, if above 1"
    )
    seed: int | None = _flag(None, "the same seed gives the same output")
    min_tokens: int | None = _flag(0, "generate at least this many tokens")
    ignore_eos: bool | None = _flag(False, "go on after end-of-text tokens")
    include_stop_str_in_output: bool | None = _flag(False, "keep the stop text at the end of the output")
    skip_special_tokens: bool | None = _flag(True, "show special tokens in the text")
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: str | bool | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
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
    truncate_prompt_tokens: InitVar[object] = None
    extra_args: InitVar[object] = None

    def __post_init__(self, *foreign: object) -> None:
        judge(SAMPLING_FIELDS, foreign, stacklevel=3)
        for name, (is_legal, kind) in _LEGAL.items():
            value = getattr(self, name)
            require(name, value, value is None or is_legal(value), f"{kind} or None")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        for fault in faults_in(self.options):
            raise InvalidRequest.of_field(f"sampling.{fault.field}", fault.text)

    @property
    def options(self) -> dict[str, Any]:
        """What is set, by its names in the public proto."""
        options = {name: value for name in SamplingFields.__annotations__ if (value := getattr(self, name)) is not None}
        if self.top_k == -1:
            options["top_k"] = 0
        if self.beam_width is not None and isinstance(self.temperature, Default):
            del options["temperature"]
        if isinstance(self.stop, str):
            options["stop"] = [self.stop]
        if (given := options.pop("structured_outputs", None)) is not None:
            options |= [given.option]
        return options

    def updated(self, **changes: Unpack["SamplingFields"]) -> "SamplingParams":
        """Returns parameters with other values of some fields. Raises TypeError for an unknown name."""
        for name in changes:
            if name not in SamplingFields.__annotations__:
                near = suggestion(name, SamplingFields.__annotations__)
                raise TypeError(f"{name!r} is no sampling parameter and no other argument{near}")
        return replace(self, **changes)

    def clone(self) -> "SamplingParams":
        """Returns a copy that shares no list with these."""
        return deepcopy(self)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and defaults: the `beam_width` best hypotheses come. They are
    checked as those of `SamplingParams` are, which says what they mean.

    As in vLLM a search goes on while a better hypothesis can still come; `early_stopping` may say otherwise.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    early_stopping: str | bool = "never"

    def __post_init__(self) -> None:
        require("beam_width", self.beam_width, is_integer(self.beam_width), "an integer")
        self.sampling  # noqa: B018  # raises what is wrong with the others

    @property
    def sampling(self) -> SamplingParams:
        """The same as parameters of a request."""
        return SamplingParams(n=self.beam_width, **{field.name: getattr(self, field.name) for field in fields(self)})


def is_list(value: object, is_element: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_element, value))


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(is_integer(key) and is_real(value[key]) for key in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_json(value: object) -> bool:
    return isinstance(value, str | Mapping)


# What structured outputs take: exactly one of these, of such a value.
STRUCTURES: dict[str, tuple[Callable[[object], bool], str]] = {
    "json": (_is_json, "a JSON Schema: a dict, JSON, or a class with model_json_schema()"),
    "regex": (_is_text, "a text"),
    "choice": (lambda value: bool(value) and is_list(value, _is_text), "a list of texts, at least one"),
    "grammar": (_is_text, "a text"),
    "json_object": (lambda value: value is True, "True, or left out"),
    "structural_tag": (_is_json, "a dict or JSON"),
}


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments. Made by `make docs`; do not edit."""

    n: int | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: str | bool | None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None


def _of_type(hint: object) -> tuple[str, ...]:
    return tuple(field.name for field in fields(SamplingParams) if field.type == hint)


INTEGER_FIELDS, REAL_FIELDS, BOOLEAN_FIELDS = _of_type(int | None), _of_type(float | None), _of_type(bool | None)
_LEGAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(INTEGER_FIELDS, (is_integer, "an integer")),
    **dict.fromkeys(REAL_FIELDS, (is_real, "a number")),
    **dict.fromkeys(BOOLEAN_FIELDS, (lambda value: isinstance(value, bool), "a bool")),
    "stop": (lambda value: _is_text(value) or is_list(value, _is_text), "texts"),
    **dict.fromkeys(
        ("stop_token_ids", "logprob_token_ids"), (lambda value: is_list(value, is_integer), "a list of integers")
    ),
    "logit_bias": (_is_bias, "a mapping from token ids to numbers"),
    "early_stopping": (
        lambda value: isinstance(value, str | bool) and value in EARLY_STOPPING,
        f"one of {', '.join(map(repr, EARLY_STOPPING))}",
    ),
}
# Those that flags of the client verbs set, and of them those that flags of the bench verbs set.
FLAGS: tuple[Field, ...] = tuple(field for field in fields(SamplingParams) if field.metadata)
BENCH_FIELDS = tuple(field.name for field in FLAGS if field.metadata["is_benched"])
# What a request without sampling parameters asks for: the server's own choices.
UNSET = SamplingParams(**{field.name: None for field in fields(SamplingParams)})
