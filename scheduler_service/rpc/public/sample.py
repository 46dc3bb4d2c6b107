"""One sample of a call on its way to the client: deltas of tokens in, responses out.

Deltas that come while the client is not reading are merged, so that what waits is at most the sample itself.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.rpc.public.transcript import Transcript
from scheduler_service.serving.token_stream import Delta

# Tokens, or prompt log-probabilities, of one response: keeps it far below a client's message limit of 4 MiB.
MAX_RESPONSE_TOKENS = 2048

Entry = TypeVar("Entry")


class Sample:
    def __init__(self, request_id: str, index: int, transcript: Transcript, *, with_logprobs: bool) -> None:
        self._request_id = request_id
        self._index = index
        self._with_logprobs = with_logprobs
        self._cumulative_logprob: float | None = 0.0 if with_logprobs else None
        self._num_taken = 0
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._ends = False  # the last response has not been taken
        self.transcript = transcript

    def add(self, delta: Delta) -> None:
        """Take what the sequence got."""
        if delta.prompt_logprobs and self._index == 0:
            self._prompt_logprobs.extend(delta.prompt_logprobs)
        num_kept, text = self.transcript.add(delta.first_token, delta.token_ids, delta.end)
        self._token_ids.extend(delta.token_ids[:num_kept])
        if delta.logprobs:
            self._logprobs.extend(delta.logprobs[:num_kept])
        if text:
            self._texts.append(text)
        if delta.end is not None:
            self._ends = self.transcript.end is not None
            if delta.cumulative_logprob is not None:
                self._cumulative_logprob = delta.cumulative_logprob

    def skip_to(self, num_tokens: int) -> None:
        """The tokens before this one have gone to the client another way."""
        self._num_taken = num_tokens
        self.transcript.skip_to(num_tokens)

    def take(self) -> Iterable[scheduler_pb2.GenerateResponse]:
        """The responses that are due, none if there is nothing new."""
        num_tokens = len(self._token_ids)
        if self._with_logprobs or self._prompt_logprobs or self._ends or num_tokens > MAX_RESPONSE_TOKENS:
            return self._pieces()
        if not num_tokens and not self._texts:
            return ()
        # What all but the last delta of most requests are, made in one go.
        response = scheduler_pb2.GenerateResponse(
            request_id=self._request_id,
            index=self._index,
            first_token=self._num_taken,
            token_ids=self._token_ids,
            text="".join(self._texts),
        )
        self._num_taken += num_tokens
        self._token_ids.clear()
        self._texts.clear()
        return (response,)

    def _pieces(self) -> Iterator[scheduler_pb2.GenerateResponse]:
        while self._prompt_logprobs:
            response = self._response()
            response.prompt_logprobs.extend(encode_logprobs(entry) for entry in _cut(self._prompt_logprobs))
            yield response
        while self._token_ids or self._texts or self._ends:
            response = self._response()
            token_ids = _cut(self._token_ids)
            response.token_ids.extend(token_ids)
            self._num_taken += len(token_ids)
            if self._with_logprobs:
                logprobs = _cut(self._logprobs)
                response.logprobs.extend(encode_logprobs(entry) for entry in logprobs)
                self._cumulative_logprob = sum((entry.logprob for entry in logprobs), self._cumulative_logprob or 0.0)
                response.cumulative_logprob = self._cumulative_logprob
            if not self._token_ids:
                response.text = "".join(self._texts)
                self._texts.clear()
                if self._ends:
                    self._ends = False
                    self.transcript.finish(response, self._cumulative_logprob)
            yield response

    def _response(self) -> scheduler_pb2.GenerateResponse:
        return scheduler_pb2.GenerateResponse(
            request_id=self._request_id, index=self._index, first_token=self._num_taken
        )


def _cut(entries: list[Entry]) -> list[Entry]:
    """Take the first entries off, as many as one response holds."""
    head = entries[:MAX_RESPONSE_TOKENS]
    del entries[:MAX_RESPONSE_TOKENS]
    return head


def encode_logprobs(entry: TokenLogprobs) -> scheduler_pb2.TokenLogprobs:
    return scheduler_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[scheduler_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )
