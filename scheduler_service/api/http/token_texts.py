"""The texts of tokens, and log-probabilities in the formats of OpenAI's API.

The bytes of a token may not be complete UTF-8 characters. The text of such a token shows its bytes as escapes, as in
OpenAI's API.
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

LOWEST = -9999.0  # JSON has no infinity
_PIECE_ROWS = 256  # rows of a completion's columns that one encoder call writes
# One row of a completion's columns: the token's offset, log-probability and text, and the most likely tokens.
_Row = tuple[int, float | None, str, dict[str, float] | None]


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """A lookup of the text of a token by its id, for answers that list tokens. If `as_ids` is set or the model has no
    tokenizer, the text of a token is `token_id:N`, where N is the token's id."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token's text, or empty bytes if the model has no tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.bytes_of(token_id)

    def text_of(self, token_id: int, prefix: str = "") -> str:
        """Return the text of a token. If the token's bytes are not valid UTF-8, return `prefix` followed by the bytes
        as escapes such as `\\xe2`."""
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
        """Convert the log-probabilities of a prompt's tokens to the format of the answer's field `prompt_logprobs`: a
        list with one entry for each token. An entry contains the token of the prompt and the most likely tokens at its
        position. The entry of the first token is None."""
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
        """Return the text of a token. U+FFFD replaces bytes that are not valid UTF-8.

        Several tokens may have the same text. Clients can distinguish such tokens by their ids in the HTTP answer.
        """
        return self.bytes_of(token_id).decode(errors="replace")


class CompletionTokens:
    """A converter of the tokens of one output to the format of `/v1/completions`. It counts the characters of the
    tokens up to now, because the answer contains the offset of each token in the text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def logprobs(self, entries: Iterable[TokenLogprobs], first_token_id: int | None = None) -> CompletionLogprobs:
        """Convert the log-probabilities of the next tokens to the format of OpenAI's completions, which has one list
        for each kind of value. If `first_token_id` (the first token of an echoed prompt) is set, this token comes
        first, without a log-probability."""
        columns: list[list[bytes]] = [[], [], [], []]  # the encoded pieces of each column
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
            top = {self._text(entry.token_id): _finite(entry.logprob)}  # first, because vLLM's clients expect it there
            top |= {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            yield self._row(entry.token_id, _finite(entry.logprob), top)

    def _row(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> _Row:
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offset, logprob, self._text(token_id), top

    def _text(self, token_id: int) -> str:
        return self._texts.text_of(token_id, "bytes:")


class ReasoningTokens:
    """A filter that counts the reasoning tokens in one output and removes them from deltas (pieces of new output). A
    token belongs to the reasoning if its text begins between the reasoning tags."""

    def __init__(self, texts: TokenTexts, parser: OutputParser) -> None:
        """Create a filter of the reasoning tokens of one output. `parser` must be the parser that reads the text of the
        same output. The filter asks the parser which characters belong to the reasoning."""
        self.count = 0
        self._texts = texts
        self._parser = parser
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        self._unknown: deque[tuple[int, int, TokenLogprobs | None]] = deque()  # (text offset, token id, logprobs)

    def others(self, delta: Delta) -> Delta:
        """Count the reasoning tokens of a delta (a piece of new output), and return the delta without these tokens.
        Call this after the parser has read the text of the delta. If more text is needed to classify a token, a later
        call counts or returns the token."""
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
    return max(logprob, LOWEST)
