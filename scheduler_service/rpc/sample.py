"""One sample of a call on its way to the client: deltas of tokens in, responses out.

Deltas that come while the client is not reading are merged, so that what waits is at most the sample itself.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs

# Tokens, or prompt log-probabilities, of one response: keeps it far below a client's message limit of 4 MiB.
_MAX_RESPONSE_TOKENS = 2048

Entry = TypeVar("Entry")

_FINISH_REASONS = {
    EndReason.STOP: scheduler_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: scheduler_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: scheduler_pb2.FINISH_REASON_ABORT,
}


class Decoded(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def stop_text(self) -> str | None: ...

    @property
    def num_tokens(self) -> int: ...


class Decoder(Protocol):
    """Makes text of tokens and watches for stop texts."""

    def push(self, token_ids: Sequence[int]) -> Decoded: ...

    def flush(self) -> str: ...


class Sample:
    def __init__(
        self, request_id: str, index: int, decoder: Decoder | None, *, with_logprobs: bool, keep_stop_token_text: bool
    ) -> None:
        """`decoder` None: all text is empty. `keep_stop_token_text`: the token that ends the output leaves text."""
        self._request_id = request_id
        self._index = index
        self._decoder = decoder
        self._keep_stop_token_text = keep_stop_token_text
        self._with_logprobs = with_logprobs
        self._cumulative_logprob = 0.0
        self._num_taken = 0
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._stop_text: str | None = None
        self._end: SequenceEnd | None = None
        self.failure: SequenceEnd | None = None  # the output ended, but not well

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self._num_tokens

    @property
    def is_stopped(self) -> bool:
        """A stop text ended the output."""
        return self._stop_text is not None

    def add(
        self,
        first_token: int,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        prompt_logprobs: list[TokenLogprobs],
        end: SequenceEnd | None,
    ) -> None:
        """Take what the sequence got. Tokens after a stop text are dropped."""
        if self._index == 0:
            self._prompt_logprobs.extend(prompt_logprobs)
        if self._stop_text is None:
            if first_token != self._num_tokens:
                raise RuntimeError(f"a delta begins at token {first_token}, but token {self._num_tokens} is next")
            num_kept = self._decode(token_ids, end)
            self._token_ids.extend(token_ids[:num_kept])
            self._logprobs.extend(logprobs[:num_kept])
            self._num_tokens += num_kept
        if end is not None and self._stop_text is None and end.reason not in _FINISH_REASONS:
            self.failure = end
        else:
            self._end = end

    def take(self) -> Iterator[scheduler_pb2.GenerateResponse]:
        """The responses that are due, none if there is nothing new."""
        while self._prompt_logprobs:
            response = self._response()
            response.prompt_logprobs.extend(_encode(entry) for entry in _cut(self._prompt_logprobs))
            yield response
        while self._token_ids or self._texts or self._end is not None:
            response = self._response()
            token_ids = _cut(self._token_ids)
            response.token_ids.extend(token_ids)
            self._num_taken += len(token_ids)
            if self._with_logprobs:
                logprobs = _cut(self._logprobs)
                response.logprobs.extend(_encode(entry) for entry in logprobs)
                self._cumulative_logprob += sum(entry.logprob for entry in logprobs)
                response.cumulative_logprob = self._cumulative_logprob
            if not self._token_ids:
                response.text = "".join(self._texts)
                self._texts = []
                if self._end is not None:
                    self._finish(response, self._end)
                    self._end = None
            yield response

    def _decode(self, token_ids: list[int], end: SequenceEnd | None) -> int:
        """Make text of new tokens. How many of them belong to the output."""
        if self._decoder is None:
            return len(token_ids)
        num_with_text = len(token_ids)
        if end is not None and end.stop_token_id is not None and not self._keep_stop_token_text:
            num_with_text = max(0, num_with_text - 1)
        decoded = self._decoder.push(token_ids[:num_with_text])
        text = decoded.text
        if decoded.stop_text is not None:
            self._stop_text = decoded.stop_text
        elif end is not None:
            text += self._decoder.flush()
        if text:
            self._texts.append(text)
        return len(token_ids) if decoded.stop_text is None else decoded.num_tokens

    def _finish(self, response: scheduler_pb2.GenerateResponse, end: SequenceEnd) -> None:
        if self._stop_text is not None:
            response.finish_reason = scheduler_pb2.FINISH_REASON_STOP
            response.stop_text = self._stop_text
        else:
            response.finish_reason = _FINISH_REASONS[end.reason]
            if end.stop_token_id is not None:
                response.stop_token_id = end.stop_token_id
        response.usage.prompt_tokens = end.num_prompt_tokens
        response.usage.cached_tokens = end.num_cached_tokens
        response.usage.completion_tokens = self._num_tokens

    def _response(self) -> scheduler_pb2.GenerateResponse:
        return scheduler_pb2.GenerateResponse(
            request_id=self._request_id, index=self._index, first_token=self._num_taken
        )


def _cut(entries: list[Entry]) -> list[Entry]:
    """Take the first entries off, as many as one response holds."""
    head = entries[:_MAX_RESPONSE_TOKENS]
    del entries[:_MAX_RESPONSE_TOKENS]
    return head


def _encode(entry: TokenLogprobs) -> scheduler_pb2.TokenLogprobs:
    return scheduler_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[scheduler_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )
