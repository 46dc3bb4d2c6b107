"""A tokenizer whose tokens are written as their numbers, one after another: stop texts begin and end amid tokens."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from scheduler_service.serving.checkpoint.tokenizer import Tokenizer

_Result = TypeVar("_Result")


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(str, token_ids))


def tokens_of(text: str) -> list[int]:
    """Those of a prompt, which are others than text is made of."""
    return [ord(char) % 90 for char in text]


class ToyTokenizer(Tokenizer):
    """The real one's decoders run over it. A prompt takes some of the loop's time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._byte_tokens = {}
        self.special_token_ids = frozenset()
        self.max_token_bytes = None

    async def encode(
        self,
        text: str,
        max_tokens: int,
        then: Callable[[list[int]], _Result],
        *,
        add_special_tokens: bool = True,
        is_long: bool = False,
    ) -> _Result | int:
        await asyncio.sleep(self._rng.random() * 0.05)
        token_ids = tokens_of(text)
        return then(token_ids) if len(token_ids) <= max_tokens else len(token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return text_of(token_ids)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:
        return str(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        return str(token_id).encode()
