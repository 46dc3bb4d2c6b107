"""The request types of llama-server's own API (llama.cpp). These types alone decide which requests are valid.

Options that llama-server turns off by default, such as `mirostat` and `dry_multiplier`, are accepted with the value
that turns them off (see `body.py`), and are refused with any other value.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from pagewire.common.wire.sampling_rules import FILTERS_OFF, LOGIT_BIAS, RANGES, UINT32
from scheduler_service.api.http.requests import INT64, SampledRequest, TokenId, why, within

_Bias = Annotated[float, within(LOGIT_BIAS)] | Literal[False]
_BiasText = Annotated[str, Meta(max_length=256)]
# A text, token ids, or both in a list. A list without token ids at the top contains several prompts.
LlamaPrompt = str | Annotated[list[str | TokenId | list[str | TokenId]], Meta(min_length=1)]
# An object, in which texts of digits are token ids, or pairs of a token id or a text and its bias.
LlamaBiases = Annotated[
    dict[_BiasText, _Bias] | list[tuple[TokenId | _BiasText, _Bias]],
    why("of token ids, or of all tokens of a text; false: -100"),
]
# Other names of fields: a name of llama-server's own, and names of OpenAI's API, which llama-server accepts too.
_ALIASES: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "n_predict"),
    **{"n": "n_cmpl", "logprobs": "n_probs"},
}


class LlamaCompletionRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request of llama-server's `/completion`. Options that it does not set have the model's defaults, as in
    `/v1/completions`, not those of llama.cpp. `repeat_penalty` is an alias of `repetition_penalty`."""

    prompt: Annotated[LlamaPrompt, why("several prompts: the answer is a list")]
    n_predict: (
        Annotated[int, Meta(ge=-1, le=UINT32.high), why("default and -1: up to the maximum sequence length")] | None
    ) = None
    n_cmpl: Annotated[int, within(RANGES["n"])] | None = None
    seed: Annotated[int, within(INT64), why("default, -1 and 4294967295: random")] | None = None
    repeat_last_n: (
        Annotated[int, Meta(ge=-1), why("-1: penalties apply to all tokens; other numbers: only without penalties")]
        | None
    ) = None
    logit_bias: LlamaBiases | None = None  # type: ignore[assignment]  # other forms than OpenAI's
    samplers: (
        Annotated[
            list[str],
            Meta(max_length=64),
            why(
                f"{', '.join(FILTERS_OFF)} are off if they are not listed; other samplers and the order have no effect"
            ),
        ]
        | None
    ) = None
    grammar: Annotated[str, why("a grammar in GBNF or Lark syntax")] | None = None
    json_schema: Raw | UnsetType = UNSET
    n_probs: Annotated[int, Meta(ge=0, le=int(RANGES["logprobs"].high))] | None = None
    post_sampling_probs: Annotated[bool, why("requires temperature 0")] | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: (
        Annotated[
            list[Annotated[str, Meta(max_length=256)]],
            Meta(max_length=256),
            why("the fields of the answer, such as generation_settings/seed"),
        ]
        | None
    ) = None
    n_keep: Annotated[int, why("no effect: a prompt that is too long is refused")] | None = None
    n_indent: Annotated[int, why("no effect: use stop texts")] | None = None
    t_max_predict_ms: Annotated[int, why("no effect: limit the output with n_predict")] | None = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Rename aliases of fields, such as `max_tokens` for `n_predict`, and replace prompts that are objects by their
        texts. Return the request."""
        renamed = {name: given[alias] for alias, name in _ALIASES.items() if alias in given}
        named = {name: value for name, value in given.items() if name not in _ALIASES}
        return renamed | {name: _plain_prompts(value) if name == "prompt" else value for name, value in named.items()}


def _plain_prompts(given: Any) -> Any:
    """Replace prompts in the form of objects, which clients of multimodal models send, by their texts."""
    match given:
        case {"prompt_string": str(text), **others} if not any(others.values()):
            return text
        case list():
            return [*map(_plain_prompts, given)]
    return given


class OtherFile(Struct, forbid_unknown_fields=True, frozen=True):
    filename: str
    text: str
    time: Annotated[float, why("no effect: the files keep their order")] | None = None


class InfillRequest(LlamaCompletionRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request of llama-server's `/infill`, for the text between a prefix and a suffix."""

    input_prefix: str
    input_suffix: str
    prompt: Annotated[str, why("follows input_prefix")] = ""
    input_extra: Annotated[list[OtherFile], why("other files, in front of the prefix")] | None = None
