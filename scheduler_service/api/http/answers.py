"""The answer types of the HTTP API, in OpenAI's format. vLLM's additional fields are filled in only if a request asks
for them."""

import itertools
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

_PIECE_ITEMS = 2048  # list items per encoder call, because the encoder holds the GIL
encode = msgspec.json.Encoder().encode


def encode_list(items: Iterable[Any]) -> Any:
    """Encode a list as JSON in small pieces. Return a msgspec `Raw` value, which replaces the list as a field of an
    answer. Each encoder call encodes at most _PIECE_ITEMS items, because the encoder holds the GIL during the call. If
    `items` is an iterator, only one piece of items is in memory at a time."""
    rest, pieces = iter(items), []
    while piece := list(itertools.islice(rest, _PIECE_ITEMS)):
        pieces.append(encode(piece)[1:-1])
    return Raw(b"[%b]" % b",".join(pieces))


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageCounts(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: OutputTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


# One entry for each token of a prompt, keyed by token id. The entry of the first token is None.
PromptLogprobsField = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobsField | UnsetType | None = UNSET


class GeneratedAnswer(Struct, frozen=True):
    """The fields with which the answers of both completion endpoints begin."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionAnswer(GeneratedAnswer, frozen=True):
    """The answer of `/v1/completions`, or one event of a streamed answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageCounts | UnsetType | None = UNSET


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    """A tool call in an answer. An event of a streamed answer contains only the new part of the tool call with the same
    `index`."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    """A message of the model in a chat answer. An event of a streamed answer contains only the new part of the message.
    Both `reasoning` and `reasoning_content` contain the reasoning, because some clients read the first field and some
    the second."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """An output in the answer of `/v1/chat/completions`. A whole answer sets `message`. An event of a streamed answer
    sets `delta`, the new part of the message."""

    index: int
    message: ChatMessage | UnsetType
    delta: ChatMessage | UnsetType
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatAnswer(GeneratedAnswer, frozen=True):
    """The answer of `/v1/chat/completions`, or one event of a streamed answer."""

    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobsField | UnsetType | None = UNSET
    service_tier: Literal["default"] = "default"


class Model(Struct, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(Struct, frozen=True):
    object: Literal["list"]
    data: list[Model]


class Tokens(Struct, frozen=True):
    """The tokens of a text. If the request sets `with_pieces`, each token is an object with its text."""

    count: int
    max_model_len: int
    tokens: list[int | dict[str, Any]]
    token_strs: list[str] | None


class DecodedPrompt(Struct, frozen=True):
    """The text of tokens, with vLLM's name and with llama-server's name."""

    prompt: str
    content: str


class RenderedPrompt(Struct, frozen=True):
    """The token ids of a request's prompt, as the answer of the `/render` endpoints."""

    request_id: str
    model: str
    token_ids: list[int]


class EmbeddingItem(Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Struct, frozen=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: UsageCounts


class DetachedOutput(Struct, frozen=True):
    """The output of one sample of a detached request (a request that runs without its client) up to now. An event of a
    streamed answer contains only the new part of the output."""

    index: int
    first_token: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    usage: UsageCounts | None
    logprobs: ChatLogprobs | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsField | UnsetType = UNSET


class DetachedAnswer(Struct, frozen=True):
    request_id: str
    state: Literal["running", "finished", "failed"]
    outputs: list[DetachedOutput] | UnsetType = UNSET
    failure: str | UnsetType = UNSET
