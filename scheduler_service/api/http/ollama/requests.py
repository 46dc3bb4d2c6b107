"""The request types of Ollama's API. These types alone decide which requests are valid."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, defstruct, structs

from pagewire.common.wire.sampling_rules import RANGES, UINT32
from scheduler_service.api.http.requests import (
    INERT,
    INT64,
    Empty,
    QueuedRequest,
    SampledRequest,
    Texts,
    ToolField,
    why,
    within,
)

_INERT = Meta(description=INERT)
# The sampling options of all APIs, which have the same names in Ollama's API.
SAMPLING_OPTIONS = tuple(SampledRequest.__annotations__)
_NO_IMAGES = why("the model reads text only")
KeepAlive = Annotated[float | str, why("no effect: the model stays loaded")]
_SamplingOptions: Any = defstruct(
    "SamplingOptions",
    [(each.name, each.type, None) for each in structs.fields(SampledRequest) if each.name in SAMPLING_OPTIONS],
    forbid_unknown_fields=True,
    frozen=True,
)


class OllamaOptions(_SamplingOptions, forbid_unknown_fields=True, frozen=True):  # type: ignore[call-arg]
    """The sampling options of a request. Options that are unset have the model's own defaults, not Ollama's. The
    options that Ollama needs to load a model, such as `num_ctx`, have no effect."""

    num_predict: (
        Annotated[int, Meta(ge=-2, le=UINT32.high), why("default, -1 and -2: up to the maximum sequence length")] | None
    ) = None
    seed: Annotated[int, within(INT64), why("-1: random")] | None = None
    repeat_penalty: (
        Annotated[float, within(RANGES["repetition_penalty"]), why("alias of repetition_penalty")] | None
    ) = None
    repeat_last_n: (
        Annotated[int, Meta(ge=-1, le=UINT32.high), why("-1: penalties apply to all tokens; 0: no penalties")] | None
    ) = None


class OllamaRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The fields that requests for a chat and for a completion share."""

    stream: Annotated[bool, why("default: true")] | None = None
    format: (
        Annotated[Literal["", "json"] | dict[str, Any], why("json, or a JSON Schema that the output must match")] | None
    ) = None
    options: OllamaOptions | None = None
    think: (
        Annotated[
            bool | Literal["low", "medium", "high", "max"],
            why("sets the chat template's variables enable_thinking and reasoning_effort"),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20), why("requires logprobs")] | None = None
    keep_alive: KeepAlive | None = None
    truncate: Annotated[Literal[False], why("a prompt that is too long is refused")] | None = None
    shift: Annotated[Literal[False], why("outputs end at the maximum sequence length")] | None = None


class OllamaFunction(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    arguments: dict[str, Any] | None = None
    index: Annotated[int, _INERT] | None = None


class OllamaCall(Struct, forbid_unknown_fields=True, frozen=True):
    """A tool call of an earlier answer."""

    function: OllamaFunction
    index: Annotated[int, _INERT] | None = None
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Struct, forbid_unknown_fields=True, frozen=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Annotated[Empty, _NO_IMAGES] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Annotated[str, why("the tool whose result this is")] | None = None
    name: Annotated[str, why("alias of tool_name")] | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    messages: Annotated[list[OllamaMessage], why("none: wait until the model is loaded")] | None = None
    tools: list[ToolField] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    prompt: Annotated[str, why("empty: wait until the model is loaded")] | None = None
    suffix: Annotated[str, why("the text after the output; requires a model that can insert text")] | None = None
    system: str | None = None
    raw: Annotated[bool, why("true: do not apply the chat template")] | None = None
    template: Annotated[Literal[""], why("use raw, and apply the template yourself")] | None = None
    context: Annotated[Empty, why("use /api/chat, and send the conversation")] | None = None
    images: Annotated[Empty, _NO_IMAGES] | None = None


class OllamaEmbedRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    input: Texts | None = None
    truncate: Annotated[bool, why("default: true; false: refuse an input that is too long")] | None = None
    dimensions: (
        Annotated[int, Meta(ge=0), why("return this many leading numbers of each embedding, scaled to unit length")]
        | None
    ) = None
    options: Annotated[dict[str, Any], _INERT] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request of Ollama's deprecated endpoint for the embedding of one text."""

    prompt: str | None = None
    options: Annotated[dict[str, Any], _INERT] | None = None
    keep_alive: KeepAlive | None = None


class OllamaShowRequest(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    model: str | None = None
    name: Annotated[str, why("alias of model")] | None = None
    verbose: Annotated[bool, _INERT] | None = None


class OllamaPullRequest(OllamaShowRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    stream: Annotated[bool, why("default: true")] | None = None
    insecure: Annotated[bool, _INERT] | None = None
