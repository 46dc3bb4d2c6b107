"""Follows the output of a detached request over all connections of a client that attaches to it."""

from collections.abc import Sequence
from dataclasses import replace

import grpc

from pagewire.completion import Output, broken_stream
from pagewire.errors import InternalError


class Attachment:
    """Hands on each token, each log-probability of the prompt and each sample's end once and in order, whatever the
    server sends again after a reconnect. Raises InternalError for anything that is missing."""

    def __init__(self, from_token: int) -> None:
        self._from_token = from_token
        self._next_tokens: list[int] = []  # of the samples seen, by index
        self._ended: set[int] = set()
        self._num_prompt_logprobs = 0
        self._num_prompt_logprobs_sent = 0  # in this connection

    def reconnect(self) -> Sequence[int]:
        """Begins a new connection. Returns the first token to ask for, of each sample that was seen."""
        self._num_prompt_logprobs_sent = 0
        return self._next_tokens

    def take(self, output: Output) -> Output | None:
        """Returns the part of a delta that is new, or None if nothing is."""
        while len(self._next_tokens) <= output.index:
            self._next_tokens.append(self._from_token)
        if output.prompt_logprobs is not None:
            return self._take_prompt_logprobs(output)
        if output.index in self._ended:
            if output.token_ids:
                raise broken_stream(output, "tokens after its end")
            return None
        next_token = self._next_tokens[output.index]
        if output.first_token != next_token:
            raise broken_stream(output, f"token {output.first_token} where {next_token} is next")
        self._next_tokens[output.index] += len(output.token_ids)
        if output.finish_reason is not None:
            self._ended.add(output.index)
        return output

    def finish(self) -> None:
        """Checks, when the stream has ended well, that every sample has ended."""
        if not self._next_tokens or len(self._ended) < len(self._next_tokens):
            raise InternalError("the stream ended before its samples", code=grpc.StatusCode.INTERNAL)

    def _take_prompt_logprobs(self, output: Output) -> Output | None:
        assert output.prompt_logprobs is not None
        new = output.prompt_logprobs[max(0, self._num_prompt_logprobs - self._num_prompt_logprobs_sent) :]
        self._num_prompt_logprobs_sent += len(output.prompt_logprobs)
        self._num_prompt_logprobs += len(new)
        return replace(output, prompt_logprobs=new) if new else None
