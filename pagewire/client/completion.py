"""The output of a request: deltas as they come, and the whole of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc

from pagewire.client.errors import Cancelled, InternalError, PagewireError


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of a request's tokens. `cached_tokens` are prompt tokens that needed no computing."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token: natural, after penalties and bias, before temperature and filters.

    `rank` counts from 1. `top` holds the most likely tokens as (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A delta of one sample.

    `token_ids` and `text` are what is new; `first_token` is the index in the sample of the first of `token_ids`. The
    text may trail the tokens by an unfinished character or a possible stop text. `finish_reason` is None until the last
    delta of a sample, then "stop", "length" or "abort"; with "stop", `stop_reason` is the token id or the text that
    ended it. `usage` is set with the finish reason. `prompt_logprobs` come in deltas of sample 0.
    `cumulative_logprob` is that of the output so far, where log-probabilities were asked for; of a hypothesis it comes
    with the finish reason. `embedding` comes alone, and only where it was asked for.
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
    """One whole sample; the fields are those of `Output`."""

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
    """A whole request. Times are in seconds from sending the request; `ttft_s` is None if there was no token.

    `usage` counts the prompt once, adds up the completions, and takes the smallest `cached_tokens` of the samples.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    usage: Usage
    ttft_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """The embedding of a prompt: a vector of length 1, with as many numbers as the model's hidden states have."""

    request_id: str
    values: tuple[float, ...]
    usage: Usage

    @classmethod
    def of(cls, completion: Completion) -> "PromptEmbedding":
        """Takes it from a request that asked for one. Raises Cancelled if that was aborted."""
        (output,) = completion.outputs
        if not output.embedding:
            message = "the request was aborted before its embedding was made"
            raise Cancelled(message, code=grpc.StatusCode.CANCELLED)
        return cls(completion.request_id, output.embedding, completion.usage)


@dataclass(frozen=True, slots=True)
class Result:
    """A detached request: "running", "finished" or "failed", and all of its output so far.

    `outputs` has a delta from token 0 on for each sample. `error` says why it failed.
    """

    request_id: str
    state: str
    outputs: tuple[Output, ...]
    error: PagewireError | None


@dataclass(slots=True)
class _Sample:
    """The output of one sample that has come so far."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    last: Output | None = None


class CompletionBuilder:
    """Puts the deltas of a request together, and holds the stream to its promise.

    Each sample's tokens come once and in order, and each sample ends once (design, S6); anything else is an
    InternalError, never a text with a hole. Times are of the caller's clock.
    """

    def __init__(self, num_samples: int, started_at: float) -> None:
        self._num_samples = num_samples
        self._samples: dict[int, _Sample] = {}
        self._started_at = started_at
        self._first_token_at: float | None = None
        self._request_id = ""
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: Output, now: float) -> None:
        """Takes the next delta. Raises InternalError for one that is out of order."""
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
        """Returns the whole output. Raises InternalError if a sample has not ended."""
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
    """Follows the output of a detached request over all connections of a client that attaches to it.

    Hands on each token, each log-probability of the prompt and each sample's end once and in order, whatever the
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
        """Checks, when the stream has ended well, that every sample has ended."""
        if not self._next_tokens or len(self._ended) < len(self._next_tokens):
            raise InternalError("the stream ended before its samples", code=grpc.StatusCode.INTERNAL)

    def _take_prompt_logprobs(self, output: Output) -> Output | None:
        assert output.prompt_logprobs is not None
        new = output.prompt_logprobs[max(0, self._num_prompt_logprobs - self._num_prompt_logprobs_sent) :]
        self._num_prompt_logprobs_sent += len(output.prompt_logprobs)
        self._num_prompt_logprobs += len(new)
        return replace(output, prompt_logprobs=new) if new else None


def _broken_stream(output: Output, what: str) -> InternalError:
    """Makes the error of a stream that brought a delta which cannot follow those before it."""
    message = f"the stream of request {output.request_id!r} broke: sample {output.index} brought {what}"
    return InternalError(message, code=grpc.StatusCode.INTERNAL)
