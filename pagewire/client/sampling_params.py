"""Sampling parameters with vLLM's names and defaults, and structured output constraints."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, InitVar, dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, Unpack

from pagewire.client.arguments import is_integer, is_real, require
from pagewire.client.errors import InvalidRequest
from pagewire.common.wire.sampling_rules import faults_in
from pagewire.compatibility import SAMPLING_FIELDS, STRUCTURED_OUTPUTS_FIELDS, judge, suggestion

# The conditions that end a beam search, and transformers' values for the first two.
EARLY_STOPPING = ("heuristic", "first", "never", False, True)
Value = TypeVar("Value")


class Default(float):
    """A default value of a sampling parameter. The type distinguishes the default from an equal number that the user
    set explicitly."""


def _flag(default: Value, help_text: str, *, is_benched: bool = False) -> Value:
    """Return a dataclass field that is also a command line flag of the client commands, such as `pagewire complete`. If
    `is_benched`, the `pagewire bench` commands have the flag too.

    The flag of a boolean field sets the opposite of the field's default.
    """
    return field(default=default, metadata={"help": help_text, "is_benched": is_benched})


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A constraint that each output of a request must match. Exactly one field must be given.

    The constructor raises TypeError for a value of the wrong type, and ValueError unless exactly one field is given.
    The server checks the content of the field.

    Attributes:
        json: A JSON Schema as a dict or as JSON, or a class with `model_json_schema()`, such as a pydantic model.
        regex: A regular expression that the whole output must match.
        choice: A list of texts. The output is one of them.
        grammar: A context-free grammar, in llguidance's variant of Lark or in EBNF.
        json_object: True for any JSON object.
        structural_tag: A structural tag as a dict or as JSON.

    The constructor also accepts vLLM's fields that Pagewire does not support. Each such field is ignored with a warning
    or refused with ValueError, as listed in `pagewire.compatibility`.
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
                f"structured outputs need exactly one of {', '.join(STRUCTURES)}; got {' and '.join(given) or 'none'}"
            )
        is_legal, what = STRUCTURES[self.kind]
        require(self.kind, self._value, is_legal(self._value), what)
        self.option  # noqa: B018  # raises now for a value that cannot be written as JSON

    @staticmethod
    def of(given: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """Convert a dict with the same field names to `StructuredOutputs`. Raise TypeError for an unknown name or a
        wrong type, and ValueError unless exactly one field is given."""
        if isinstance(given, StructuredOutputs):
            return given
        require("structured_outputs", given, isinstance(given, Mapping), "StructuredOutputs or a dict or None")
        names = (*STRUCTURES, *STRUCTURED_OUTPUTS_FIELDS)
        for name in given:
            if name not in names:
                hint = suggestion(str(name), names) or f"; the fields are {', '.join(STRUCTURES)}"
                raise TypeError(f"structured_outputs has no field {name!r}{hint}")
        return StructuredOutputs(**given)

    @property
    def kind(self) -> str:
        """The name of the constraint that is set, such as "json" or "regex"."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)

    @property
    def option(self) -> tuple[str, Any]:
        """The constraint as a pair: the name of its field in the public proto, and the value. A value that is a dict is
        written as JSON.

        Raise TypeError or ValueError for a value that cannot be written as JSON.
        """
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


# vLLM's name of the class.
StructuredOutputsParams = StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names and defaults.

        SamplingParams(temperature=0.6, top_p=0.95, max_tokens=256)

    None leaves a field to the server, which uses the checkpoint's generation_config.json, then the default of the
    public proto. The constructor raises TypeError for a wrong type, and InvalidRequest (a ValueError) for an invalid
    value or combination. The server checks the limits that depend on the model or the prompt.

    Attributes:
        n: The number of samples to generate, 1 to 16. With `beam_width`, the number of hypotheses to return.
        max_tokens: The maximum number of output tokens, at least 1. None generates up to the context length.
        temperature: The randomness of the sampling, 0 to 100. 0 always selects the most likely token.
        top_p: Sample from the most likely tokens whose probabilities add up to this value, above 0 and up to 1.
            1 disables the filter.
        top_k: Sample from this number of most likely tokens. 0 and -1 disable the filter.
        min_p: Sample from tokens whose probability is at least this fraction of the highest probability, 0 to 1.
            0 disables the filter.
        presence_penalty: Subtracted from the logit of every token that the output already contains, -2 to 2.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the output, -2 to 2.
        repetition_penalty: Divides the positive logits and multiplies the negative logits of tokens that the prompt
            or the output contains, above 0 and up to 100. 1 has no effect.
        seed: The seed of the sampling. Equal seeds give equal samples. None lets the server choose a seed.
        min_tokens: The minimum number of output tokens before an end token or a stop text may end the output.
        ignore_eos: Whether to continue after the checkpoint's end tokens.
        include_stop_str_in_output: Whether the output keeps the stop text that ended it.
        skip_special_tokens: Whether to leave special tokens out of the text.
        stop: A text, or up to 16 texts, that end the output. Each has 1 to 256 characters.
        stop_token_ids: Up to 64 tokens that end the output, in addition to the checkpoint's end tokens.
        logit_bias: Values from -100 to 100 that are added to the logits of up to 1,024 tokens, by token id.
        logprobs: Return the log-probability of each output token and of this number of most likely tokens, 0 to 20.
            -1 returns the log-probabilities of all tokens of the vocabulary.
        prompt_logprobs: The same for each prompt token except the first. Such a request uses no cached prefix.
        logprob_token_ids: Return the log-probabilities of these tokens, at most 128, instead of the most likely ones.
        beam_width: The number of beams, 1 to 16. If set, beam search replaces sampling: the `n` best hypotheses are
            returned when the search has ended, best first, each with its `cumulative_logprob`. Beam search
            refuses stop texts, log-probabilities, sampling filters, and an explicit temperature other than 0.
        length_penalty: The score of a hypothesis is cumulative_logprob / num_tokens ** length_penalty. Only with
            `beam_width`, where the default is 1.
        early_stopping: The condition that ends a beam search with `beam_width` finished hypotheses, as in
            transformers: "heuristic" (or False, the default), "first" (or True) or "never".
        structured_outputs: A constraint that each output must match: `StructuredOutputs`, or a dict of its fields.

    The constructor also accepts vLLM's fields that Pagewire does not support. Each such field is ignored with a warning
    or refused with ValueError, as listed in `pagewire.compatibility`.
    """

    n: int | None = 1
    max_tokens: int | None = _flag(16, "maximum number of output tokens (default: up to the context length)")
    temperature: float | None = _flag(
        Default(1.0), "randomness; 0 always selects the most likely token", is_benched=True
    )
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
    ignore_eos: bool | None = _flag(False, "continue after end-of-text tokens")
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
        """The sampling parameters that are set, as a dict from their names in the public proto to their values."""
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
        """Return a copy of the sampling parameters in which the given fields are replaced. Raise TypeError for an
        unknown field."""
        for name in changes:
            if name not in SamplingFields.__annotations__:
                near = suggestion(name, SamplingFields.__annotations__)
                raise TypeError(f"{name!r} is neither a sampling parameter nor another argument{near}")
        return replace(self, **changes)

    def clone(self) -> "SamplingParams":
        """Return a deep copy of the parameters, as in vLLM."""
        return deepcopy(self)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and defaults.

    The search returns the `beam_width` best hypotheses. The fields mean the same as in `SamplingParams`, and the
    constructor checks them in the same way. As in vLLM, the search continues as long as a better hypothesis is
    possible, unless `early_stopping` says otherwise.
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
        self.sampling  # noqa: B018  # raises an error for an invalid field

    @property
    def sampling(self) -> SamplingParams:
        """The `SamplingParams` that request the same beam search."""
        return SamplingParams(n=self.beam_width, **{field.name: getattr(self, field.name) for field in fields(self)})


def is_list(value: object, is_element: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_element, value))


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(is_integer(key) and is_real(value[key]) for key in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_json(value: object) -> bool:
    return isinstance(value, str | Mapping)


# The fields of StructuredOutputs: a check of the value, and a description of the expected value.
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
# The fields that have flags in the client verbs, and the subset that has flags in the bench verbs.
FLAGS: tuple[Field, ...] = tuple(field for field in fields(SamplingParams) if field.metadata)
BENCH_FIELDS = tuple(field.name for field in FLAGS if field.metadata["is_benched"])
# All fields None: the server chooses every parameter.
UNSET = SamplingParams(**{field.name: None for field in fields(SamplingParams)})
