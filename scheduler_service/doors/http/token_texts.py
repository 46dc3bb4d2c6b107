"""Tokens by their texts, and log-probabilities as OpenAI's API writes them.

A token's bytes need not be whole characters: such a token's text shows its bytes, as OpenAI's own does.
"""

import codecs
from collections.abc import Iterable, Sequence

from scheduler_service.core.request import TokenLogprobs
from scheduler_service.doors.http.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsField,
    TopLogprob,
)
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    """The texts of a model's tokens; without a tokenizer, or with ids in their place, there are none."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.bytes_of(token_id)

    def text_of(self, token_id: int, prefix: str = "") -> str:
        """`prefix` marks one that shows bytes."""
        if self._as_ids:
            return f"token_id:{token_id}"
        content = self.bytes_of(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in content)

    def chat_logprobs(self, entries: Iterable[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatLogprob(
                    self.text_of(entry.token_id),
                    _finite(entry.logprob),
                    list(self.bytes_of(entry.token_id)),
                    [
                        TopLogprob(self.text_of(token_id), _finite(logprob), list(self.bytes_of(token_id)))
                        for token_id, logprob in entry.top
                    ],
                )
                for entry in entries
            ]
        )

    def prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobsField:
        """Return those of a prompt: each token's own, and the most likely ones'."""
        found: PromptLogprobsField = [None]
        for entry in entries:
            ranked = {
                token_id: PromptLogprob(_finite(logprob), rank, self._readable(token_id))
                for rank, (token_id, logprob) in enumerate(entry.top, 1)
            }
            own = PromptLogprob(_finite(entry.logprob), entry.rank, self._readable(entry.token_id))
            found.append({entry.token_id: own} | ranked)
        return found

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
        columns = CompletionLogprobs([], [], [], [])
        if first_token_id is not None:
            self._add(columns, first_token_id, None, None)
        for entry in entries:
            top = {self._text(entry.token_id): _finite(entry.logprob)}  # first, as vLLM's clients expect
            top |= {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            self._add(columns, entry.token_id, _finite(entry.logprob), top)
        return columns

    def _add(
        self, columns: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        columns.text_offset.append(self._num_chars)
        columns.tokens.append(self._text(token_id))
        columns.token_logprobs.append(logprob)
        columns.top_logprobs.append(top)
        self._num_chars += len(self._decoder.decode(self._texts.bytes_of(token_id)))

    def _text(self, token_id: int) -> str:
        return self._texts.text_of(token_id, "bytes:")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
