"""The answers of Anthropic's Messages API, and the events of a streamed message."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from scheduler_service.api.http.answers import Model


class TextPart(Struct, tag_field="type", tag="text", frozen=True):
    text: str


class ThinkingPart(Struct, tag_field="type", tag="thinking", frozen=True):
    thinking: str
    signature: str = ""


class ToolUsePart(Struct, tag_field="type", tag="tool_use", frozen=True):
    id: str
    name: str
    input: dict[str, Any]


ContentPart = TextPart | ThinkingPart | ToolUsePart


class MessageUsage(Struct, frozen=True):
    """The numbers of tokens that a message of Anthropic's Messages API reports. `input_tokens` excludes the prompt
    tokens that were read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(Struct, frozen=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentPart]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


class ModelInfoAnswer(Struct, tag_field="type", tag="model", frozen=True):
    """A description of the served model, in the format of Anthropic's API."""

    id: str
    display_name: str
    created_at: datetime  # the start of the server
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class ModelPage(Struct, frozen=True):
    """The list of all served models, as one page in the format of Anthropic's API."""

    data: list[ModelInfoAnswer]
    first_id: str
    last_id: str
    has_more: bool = False


class MessageStart(Struct, tag_field="type", tag="message_start", frozen=True):
    message: MessageAnswer


class BlockStart(Struct, tag_field="type", tag="content_block_start", frozen=True):
    index: int
    content_block: ContentPart


class TextDelta(Struct, tag_field="type", tag="text_delta", frozen=True):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta", frozen=True):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta", frozen=True):
    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta", frozen=True):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta", frozen=True):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop", frozen=True):
    index: int


class Stop(Struct, frozen=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta", frozen=True):
    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop", frozen=True):
    """The last event of a streamed message."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def described_model(card: Model) -> ModelInfoAnswer:
    began_at = datetime.fromtimestamp(card.created, UTC)
    return ModelInfoAnswer(card.id, card.id, began_at, card.max_model_len, card.max_model_len)


def model_page(cards: Sequence[Model]) -> ModelPage:
    return ModelPage([described_model(card) for card in cards], cards[0].id, cards[-1].id)
