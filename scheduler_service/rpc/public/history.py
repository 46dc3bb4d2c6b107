"""All that one sample of a detached request got, readable from any token on, any number of times.

Tokens are decoded one by one, so that each has a text of its own: what it completed. Text that comes with the end alone
belongs to no token and follows the last.
"""

import asyncio
import sys
from array import array
from collections.abc import Iterator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.rpc.public.logprob_columns import LogprobColumns
from scheduler_service.rpc.public.sample import MAX_RESPONSE_TOKENS, encode_logprobs
from scheduler_service.rpc.public.transcript import Transcript
from scheduler_service.serving.token_stream import Delta

_PIECE_TOKENS = 256  # of a whole history: less than a millisecond's work, log-probabilities included
_BASE_BYTES = 4096  # of a sample without a token, and of what stands around it


class History:
    """Kept for long: some 16 bytes per token, and 20 more and 12 for each of the most likely with log-probabilities."""

    def __init__(self, request_id: str, index: int, transcript: Transcript, *, with_logprobs: bool) -> None:
        self._request_id = request_id
        self._index = index
        self._with_logprobs = with_logprobs
        self._token_ids = array("I")
        self._text = ""
        self._text_ends = array("I")  # where in the text each token's own ends
        self._logprobs = LogprobColumns()
        self._cumulative_logprobs = array("d")  # up to each token
        self._cumulative_logprob: float | None = 0.0 if with_logprobs else None
        self._prompt_logprobs = LogprobColumns()
        self.transcript = transcript

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, more or less."""
        columns = self._logprobs.num_bytes + self._prompt_logprobs.num_bytes
        return _BASE_BYTES + 16 * len(self._token_ids) + sys.getsizeof(self._text) + columns

    @property
    def num_prompt_logprobs(self) -> int:
        return len(self._prompt_logprobs)

    def add(self, delta: Delta) -> None:
        """Take what the sequence got."""
        if self._index == 0:
            self._prompt_logprobs.extend(delta.prompt_logprobs)
        texts = []
        text_end = len(self._text)
        last = max(0, len(delta.token_ids) - 1)
        for position in range(last + 1):
            token_ids = delta.token_ids[position : position + 1]
            end = delta.end if position == last else None
            num_kept, text = self.transcript.add(delta.first_token + position, token_ids, end)
            texts.append(text)
            text_end += len(text)
            if num_kept:
                self._token_ids.append(token_ids[0])
                self._text_ends.append(text_end)
                if self._with_logprobs:
                    self._add_logprobs(delta.logprobs[position])
        self._text += "".join(texts)
        if delta.cumulative_logprob is not None:
            self._cumulative_logprob = delta.cumulative_logprob

    def response(self, first_token: int, num_tokens: int) -> scheduler_pb2.GenerateResponse:
        """So many tokens from one on. With the last token comes the end, if the output has ended well."""
        stop = first_token + num_tokens
        response = self._response(first_token)
        response.token_ids.extend(self._token_ids[first_token:stop])
        start_of_text = self._text_ends[first_token - 1] if first_token else 0
        end_of_text = len(self._text)
        if stop < self.num_tokens:
            end_of_text = self._text_ends[stop - 1] if stop else 0
        response.text = self._text[start_of_text:end_of_text]
        if self._with_logprobs:
            response.logprobs.extend(encode_logprobs(entry) for entry in self._logprobs.entries(first_token, stop))
            response.cumulative_logprob = self._cumulative_logprobs[stop - 1] if stop else 0.0
        if stop == self.num_tokens and self.transcript.end is not None:
            self.transcript.finish(response, self._cumulative_logprob)
        return response

    def prompt_response(self, first: int, count: int) -> scheduler_pb2.GenerateResponse:
        """So many log-probabilities of prompt tokens from one on."""
        response = self._response(0)
        entries = self._prompt_logprobs.entries(first, first + count)
        response.prompt_logprobs.extend(encode_logprobs(entry) for entry in entries)
        return response

    async def whole(self) -> scheduler_pb2.GenerateResponse:
        """Everything so far in one message, made in pieces between which others have their turn."""
        whole, texts = self._response(0), []
        for first in range(0, self.num_prompt_logprobs, _PIECE_TOKENS):
            whole.MergeFrom(self.prompt_response(first, _PIECE_TOKENS))
            await asyncio.sleep(0)
        first_token = 0
        while True:
            num_tokens = min(_PIECE_TOKENS, self.num_tokens - first_token)
            piece = self.response(first_token, num_tokens)
            first_token += num_tokens
            texts.append(piece.text)
            piece.ClearField("first_token")
            whole.MergeFrom(piece)
            if first_token == self.num_tokens:
                whole.text = "".join(texts)
                return whole
            await asyncio.sleep(0)

    def _response(self, first_token: int) -> scheduler_pb2.GenerateResponse:
        return scheduler_pb2.GenerateResponse(request_id=self._request_id, index=self._index, first_token=first_token)

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        assert self._cumulative_logprob is not None
        self._cumulative_logprob += entry.logprob
        self._logprobs.add(entry)
        self._cumulative_logprobs.append(self._cumulative_logprob)


class HistoryReader:
    """One reader's place in a history."""

    def __init__(self, history: History, first_token: int) -> None:
        """Prompt log-probabilities are for who reads from the beginning."""
        self._history = history
        self._next_token = first_token
        self._next_prompt_logprob = 0
        self._wants_prompt_logprobs = first_token == 0
        self._has_ended = False

    def take(self) -> Iterator[scheduler_pb2.GenerateResponse]:
        """The responses that are due, none if there is nothing new."""
        history = self._history
        while self._wants_prompt_logprobs and self._next_prompt_logprob < history.num_prompt_logprobs:
            count = min(MAX_RESPONSE_TOKENS, history.num_prompt_logprobs - self._next_prompt_logprob)
            yield history.prompt_response(self._next_prompt_logprob, count)
            self._next_prompt_logprob += count
        while not self._has_ended and (self._next_token < history.num_tokens or history.transcript.end is not None):
            num_tokens = min(MAX_RESPONSE_TOKENS, history.num_tokens - self._next_token)
            response = history.response(self._next_token, num_tokens)
            self._next_token += num_tokens
            self._has_ended = response.HasField("usage")
            yield response
