"""What the gateway answered to one request, whole or streamed, in the shape of any of its routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# What differs between two answers to the same request.
_PASSING = {
    "id",
    "item_id",
    "created",
    "created_at",
    "completed_at",
    "e2e_latency",
    "cached_tokens",
    "system_fingerprint",
}


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any = None
    events: Sequence[Any] = ()  # of a stream, without its `[DONE]`

    @property
    def error(self) -> dict[str, Any]:
        """What a refusal says; without a code where the gateway does not even answer in JSON."""
        return {"message": self.body, "code": None} if isinstance(self.body, str) else self.body["error"]

    @property
    def texts(self) -> list[str]:
        """One for each choice."""
        if self.events:
            return _streamed_texts(self.events)
        if isinstance(self.body, list):
            return [sample["text"] for sample in self.body]
        if "output" in self.body:
            return [part["text"] for item in self.body["output"] for part in item["content"]]
        return [_text_of(choice) for choice in self.body["choices"]]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def ends(self) -> list[str]:
        """Why each choice ended."""
        if isinstance(self.body, list):
            return [sample["meta_info"]["finish_reason"]["type"] for sample in self.body]
        if "output" in self.body:
            return [self.body["status"]]
        return [choice["finish_reason"] for choice in self.body["choices"]]

    @property
    def num_prompt_tokens(self) -> int:
        usage = self.body[0]["meta_info"] if isinstance(self.body, list) else self.body["usage"]
        return usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]

    @property
    def num_output_tokens(self) -> int:
        usage = self.body[0]["meta_info"] if isinstance(self.body, list) else self.body["usage"]
        return usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]

    @property
    def essence(self) -> Any:
        """All that answers to equal requests have in common, but what /v1/responses only repeats of the request."""
        if self.events:
            return self.texts
        if isinstance(self.body, dict) and "output" in self.body:
            return _lasting({name: self.body[name] for name in ("status", "output", "usage", "incomplete_details")})
        return _lasting(self.body)


def _text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def _streamed_texts(events: Sequence[Any]) -> list[str]:
    texts: dict[int, str] = {}
    for event in events:
        if "meta_info" in event:
            texts[event["index"]] = event["text"]  # of all tokens so far
        elif event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
        for choice in event.get("choices") or ():
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return [texts[index] for index in sorted(texts)]


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(item) for name, item in value.items() if name not in _PASSING}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
