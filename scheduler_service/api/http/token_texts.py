"""Tokens by their texts, and log-probabilities as OpenAI's API writes them.

A token's bytes need not be whole characters: such a token's text shows its bytes, as OpenAI's own does.
"""

import codecs
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from pagewire.common.chat.chat_output import OutputParser
from scheduler_service.api.http.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsField,
    TopLogprob,
    encode,
    encode_list,
)
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.output import Delta

_LOWEST = -9999.0  # JSON has no infinity
_PIECE_ROWS = 256  # of a completion's columns, that are written at once
# What a completion's columns have of a token: its offset, its log-probability, its text, the most likely tokens.
_Row = tuple[int, float | None, str, dict[str, float] | None]


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The texts of a model's tokens; without a tokenizer, or with ids in their place, there are none."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.bytes_of(token_id)

    def text_of(self, token_id: int, prefix: str = "") -> str:
        """`prefix` marks one that shows bytes."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in content)

    def chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(encode_list(map(self.chat_logprob, entries)))

    def chat_logprob(self, entry: TokenLogprobs) -> ChatLogprob:
        return ChatLogprob(
            self.text_of(entry.token_id),
            _finite(entry.logprob),
            list(self.bytes_of(entry.token_id)),
            [
                TopLogprob(self.text_of(token_id), _finite(logprob), list(self.bytes_of(token_id)))
                for token_id, logprob in entry.top
            ],
        )

    def prompt_logprobs(self, entries: Iterable[TokenLogprobs]) -> PromptLogprobsField:
        """Return those of a prompt: each token's own, and the most likely ones'."""
        found: PromptLogprobsField = encode_list(itertools.chain([None], map(self._prompt_logprob, entries)))
        return found

    def _prompt_logprob(self, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranked = {
            token_id: PromptLogprob(_finite(logprob), rank, self._readable(token_id))
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        own = PromptLogprob(_finite(entry.logprob), entry.rank, self._readable(entry.token_id))
        return {entry.token_id: own} | ranked

    def _readable(self, token_id: int) -> str:
        """Return a token's text, as far as it is one: beside it stands its id."""
        return self.bytes_of(token_id).decode(errors="replace")


class CompletionTokens:
    """The tokens of one output so far, each with its place in the text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def logprobs(self, entries: Iterable[TokenLogprobs], first_token_id: int | None = None) -> CompletionLogprobs:
        """Return those of the next tokens. `first_token_id` is of one before them, which has none."""
        columns: list[list[bytes]] = [[], [], [], []]  # of each, the pieces
        rows = self._rows(entries, first_token_id)
        while piece := list(itertools.islice(rows, _PIECE_ROWS)):
            for pieces, column in zip(columns, zip(*piece, strict=True), strict=True):
                pieces.append(encode(column)[1:-1])
        lists: list[Any] = [Raw(b"[%b]" % b",".join(pieces)) for pieces in columns]
        return CompletionLogprobs(*lists)

    def _rows(self, entries: Iterable[TokenLogprobs], first_token_id: int | None) -> Iterator[_Row]:
        if first_token_id is not None:
            yield self._row(first_token_id, None, None)
        for entry in entries:
            top = {self._text(entry.token_id): _finite(entry.logprob)}  # first, as vLLM's clients expect
            top |= {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            yield self._row(entry.token_id, _finite(entry.logprob), top)

    def _row(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> _Row:
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offset, logprob, self._text(token_id), top

    def _text(self, token_id: int) -> str:
        return self._texts.text_of(token_id, "bytes:")


class ReasoningTokens:
    """The tokens of one output's reasoning, in a format that has tags of it: those whose text begins between them."""

    def __init__(self, texts: TokenTexts, parser: OutputParser) -> None:
        """`parser` reads the output."""
        self.count = 0
        self._texts = texts
        self._parser = parser
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        self._unknown: deque[tuple[int, int, TokenLogprobs | None]] = deque()  # each token after its place

    def others(self, delta: Delta) -> Delta:
        """Count the reasoning tokens of a delta whose text the parser has read, and return the delta without them. If
        the text to come decides about a token, a later delta has it."""
        for token_id, entry in itertools.zip_longest(delta.token_ids, delta.logprobs):
            self._unknown.append((self._num_chars, token_id, entry))
            self._num_chars += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        others: list[tuple[int, TokenLogprobs | None]] = []
        is_reasoning = self._parser.is_reasoning
        while self._unknown and (delta.end is not None or is_reasoning(self._unknown[0][0]) is not None):
            place, token_id, entry = self._unknown.popleft()
            if is_reasoning(place):
                self.count += 1
            else:
                others.append((token_id, entry))
        logprobs = [entry for _, entry in others if entry is not None]
        return delta._replace(token_ids=[token_id for token_id, _ in others], logprobs=logprobs)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
