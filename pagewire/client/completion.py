"""The output of a request: streamed deltas, complete results, and the code that assembles them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from pagewire.client.errors import Cancelled, InternalError, PagewireError


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a request. `cached_tokens` counts the prompt tokens that were found in the server's prefix
    cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural log-probability of one generated or prompt token. It is computed after penalties and bias, and before
    temperature and filters.

    `rank` is the rank of the token among all tokens of the vocabulary, from 1. `top` lists the most likely tokens as
    pairs (token id, log-probability), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A delta of one sample.

    Attributes:
        request_id: The id of the request.
        index: The index of the sample, from 0.
        token_ids: The new tokens.
        text: The new text. It may not yet include the last of `token_ids`, if their text is an incomplete character or
            may be the beginning of a stop text.
        finish_reason: None until the last delta of the sample, then "stop", "length" or "abort".
        logprobs: The log-probabilities of the new tokens, or None if none were requested.
        cumulative_logprob: The sum of the log-probabilities of the output so far, if log-probabilities were
            requested. For a beam search hypothesis, it is set together with the finish reason.
        prompt_logprobs: Log-probabilities of prompt tokens. They arrive in deltas of sample 0.
        usage: The token counts, set together with the finish reason.
        first_token: The index in the sample of the first of `token_ids`.
        stop_reason: With "stop", the token id or the stop text that ended the sample.
        embedding: The prompt's embedding. It is the only content of the response, and only set if it was requested.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    usage: Usage | None
    first_token: int
    stop_reason: int | str | None
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The complete output of one sample of a request. The fields mean the same as in `Output`."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    usage: Usage
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete output of a request.

    Attributes:
        request_id: The id of the request.
        outputs: The samples, by index.
        prompt_logprobs: The log-probabilities of the prompt tokens, or None if none were requested.
        usage: The token counts. The prompt counts once, the completion tokens of all samples are added, and
            `cached_tokens` is the smallest count of any sample.
        ttft_s: The time from sending the request to the first token, in seconds, or None without a token.
        total_s: The time from sending the request to its end, in seconds.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    usage: Usage
    ttft_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """The embedding of a prompt: a vector of length 1."""

    request_id: str
    values: tuple[float, ...]
    usage: Usage

    @classmethod
    def of(cls, completion: Completion) -> "PromptEmbedding":
        """Return the embedding of a prompt, taken from the completion of an embedding request.

        Raise Cancelled if the request was aborted before its embedding was computed.
        """
        (output,) = completion.outputs
        if not output.embedding:
            raise Cancelled("the request was aborted before its embedding was computed", code=grpc.StatusCode.CANCELLED)
        return cls(completion.request_id, output.embedding, completion.usage)


@dataclass(frozen=True, slots=True)
class Result:
    """The state of a detached request and its output so far. A detached request was queued by `submit` and runs
    independently of the client.

    `state` is "running", "finished" or "failed". `outputs` has one `Output` for each sample, with all tokens from 0.
    `error` is the error of a failed request, otherwise None.
    """

    request_id: str
    state: str
    outputs: tuple[Output, ...]
    error: PagewireError | None


@dataclass(slots=True)
class _Sample:
    """The output received so far for one sample of a request."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    last: Output | None = None


class CompletionBuilder:
    """Combines the streamed deltas of a request into a complete result, and verifies their order.

    Invariant: each sample's tokens arrive once and in order, and each sample ends once (design, S6). Any violation
    raises InternalError, so that a text with a gap is never returned. All times are readings of the caller's clock, in
    seconds.
    """

    def __init__(self, num_samples: int, started_at: float) -> None:
        self._num_samples = num_samples
        self._samples: dict[int, _Sample] = {}
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._request_id = ""
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: Output, now: float) -> None:
        """Add the next streamed delta of the request. Raise InternalError for a delta that is out of order or belongs
        to a sample that has ended."""
        if output.index >= self._num_samples:
            raise _broken_stream(output, f"tokens that were not asked for: the request has {self._num_samples} samples")
        sample = self._samples.setdefault(output.index, _Sample())
        if sample.last is not None:
            raise _broken_stream(output, "a delta after its last one")
        if output.first_token != len(sample.token_ids):
            raise _broken_stream(output, f"token {output.first_token} where {len(sample.token_ids)} is next")
        if output.token_ids and self._first_token_at is None:
            self._first_token_at = now
        self._request_id = output.request_id
        sample.token_ids += output.token_ids
        sample.texts.append(output.text)
        sample.logprobs += output.logprobs or ()
        self._prompt_logprobs += output.prompt_logprobs or ()
        if output.cumulative_logprob is not None:
            sample.cumulative_logprob = output.cumulative_logprob
        if output.finish_reason is not None:
            sample.last = output

    def finish(self, now: float) -> Completion:
        """Return the complete result of the request. Raise InternalError if a sample has not ended."""
        outputs = tuple(self._output(index) for index in range(self._num_samples))
        usage = Usage(
            prompt_tokens=outputs[0].usage.prompt_tokens,
            cached_tokens=min(output.usage.cached_tokens for output in outputs),
            completion_tokens=sum(output.usage.completion_tokens for output in outputs),
        )
        ttft_s = None if self._first_token_at is None else self._first_token_at - self._started_at
        prompt_logprobs = tuple(self._prompt_logprobs) or None
        return Completion(self._request_id, outputs, prompt_logprobs, usage, ttft_s, now - self._started_at)

    def _output(self, index: int) -> CompletionOutput:
        sample = self._samples.get(index, _Sample())
        last = sample.last
        if last is None or last.usage is None:
            raise InternalError(f"the stream ended without the end of sample {index}", code=grpc.StatusCode.INTERNAL)
        return CompletionOutput(
            index=index,
            token_ids=tuple(sample.token_ids),
            text="".join(sample.texts),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(sample.logprobs) or None,
            cumulative_logprob=sample.cumulative_logprob,
            usage=last.usage,
            embedding=last.embedding,
        )


class Attachment:
    """The position of a client in the streamed output of a detached request. The client keeps the position when it
    reconnects to the server.

    Invariant: each token, each prompt log-probability and the end of each sample are returned to the caller once and in
    order, although the server may repeat them after a reconnect. A gap in the output raises InternalError.
    """

    def __init__(self, from_token: int) -> None:
        self._from_token = from_token
        self._next_tokens: list[int] = []  # by index of the samples seen so far
        self._ended: set[int] = set()
        self._num_prompt_logprobs = 0
        self._num_prompt_logprobs_sent = 0  # on this connection

    def reconnect(self) -> Sequence[int]:
        """Prepare for the stream of a new connection. Return, for each sample seen so far, the index of the next token
        to request from the server."""
        self._num_prompt_logprobs_sent = 0
        return self._next_tokens

    def take(self, output: Output) -> Output | None:
        """Return the part of a streamed delta that was not received before, or None if the delta contains nothing new.
        The server may repeat output after a reconnect.

        Raise InternalError if tokens are missing, or if tokens follow the end of the sample.
        """
        while len(self._next_tokens) <= output.index:
            self._next_tokens.append(self._from_token)
        if output.prompt_logprobs is not None:
            return self._take_prompt_logprobs(output)
        if output.index in self._ended:
            if output.token_ids:
                raise _broken_stream(output, "tokens after its end")
            return None
        next_token = self._next_tokens[output.index]
        if output.first_token != next_token:
            raise _broken_stream(output, f"token {output.first_token} where {next_token} is next")
        self._next_tokens[output.index] += len(output.token_ids)
        if output.finish_reason is not None:
            self._ended.add(output.index)
        return output

    def finish(self) -> None:
        """Check that every sample of the request has ended, after the stream has ended without an error. Raise
        InternalError if a sample has not ended."""
        if not self._next_tokens or len(self._ended) < len(self._next_tokens):
            raise InternalError("the stream ended before its samples", code=grpc.StatusCode.INTERNAL)

    def _take_prompt_logprobs(self, output: Output) -> Output | None:
        assert output.prompt_logprobs is not None
        new = output.prompt_logprobs[max(0, self._num_prompt_logprobs - self._num_prompt_logprobs_sent) :]
        self._num_prompt_logprobs_sent += len(output.prompt_logprobs)
        self._num_prompt_logprobs += len(new)
        return replace(output, prompt_logprobs=new) if new else None


def _broken_stream(output: Output, what: str) -> InternalError:
    """Return the error for a streamed delta that is not the continuation of the previous deltas."""
    message = f"the stream of request {output.request_id!r} broke: sample {output.index} brought {what}"
    return InternalError(message, code=grpc.StatusCode.INTERNAL)
