"""A tokenizer that writes tokens as their numbers without separators: stop texts begin and end within tokens."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from scheduler_service.serving.checkpoint.infill_tokens import PromptParts
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer

_Result = TypeVar("_Result")


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(str, token_ids))


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a prompt; they differ from the tokens of generated text."""
    return [ord(char) % 90 for char in text]


class ToyTokenizer(Tokenizer):
    """A tokenizer for the production decoders. Encoding a prompt takes some simulated time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._byte_tokens = {}
        self.special_token_ids = frozenset()
        self.max_token_bytes = None

    async def encode(
        self,
        prompt: str | PromptParts,
        max_tokens: int,
        then: Callable[[list[int]], _Result],
        *,
        add_special_tokens: bool = True,
        is_long: bool = False,
    ) -> _Result | int:
        await asyncio.sleep(self._rng.random() * 0.05)
        token_ids = tokens_of(str(prompt))
        return then(token_ids) if len(token_ids) <= max_tokens else len(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return text_of(token_ids)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:
        return str(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        return str(token_id).encode()
