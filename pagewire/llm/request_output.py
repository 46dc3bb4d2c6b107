"""The results of `LLM`, which read as vLLM's do, and as nano-vllm's."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pagewire.client.completion import Completion, CompletionOutput, PromptEmbedding, TokenLogprobs

# The keys by which nano-vllm's users read a result.
KEYS = ("text", "token_ids")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural logarithm of a token's probability, after penalties and bias, before temperature and filters.

    `rank` counts from 1, and is None for a token of `logprob_token_ids` that was not chosen. `decoded_token` is None
    where the checkpoint has no tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One sample of a prompt, or one hypothesis. `logprobs` has, for each token, the chosen one and the likeliest."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: None = None
    routed_experts: None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request. `arrival_time` is when `LLM` was called, in seconds of Unix time; the others
    are in seconds since the request was sent, and None without a token."""

    num_generation_tokens: int
    arrival_time: float
    first_token_latency: float | None
    first_token_ts: float | None
    last_token_ts: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt: `.outputs[0].text`, or `["text"]` and `["token_ids"]` of the first sample.

    `prompt` is None for a prompt of token ids. `prompt_logprobs` has None for the prompt's first token. What vLLM has
    besides and Pagewire does not is None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[SampleOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Takes in the samples of another result, those of an index that is here already in place of what is here, or
        behind it where they `aggregate`."""
        for sample in next_output.outputs:
            for place, before in enumerate(self.outputs):
                if before.index == sample.index:
                    self.outputs[place] = _joined(before, sample) if aggregate else sample
                    break
            else:
                self.outputs.append(sample)

    def keys(self) -> tuple[str, ...]:
        return KEYS

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __getitem__(self, key: str) -> "str | list[int]":
        if key == "text":
            return self.outputs[0].text
        if key == "token_ids":
            return self.outputs[0].token_ids
        raise KeyError(f"{key!r} is none of {', '.join(KEYS)}; everything else is an attribute, such as .outputs")


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis. As in vLLM, `tokens` and `text` begin with the prompt's; `text` is None without a tokenizer."""

    orig_prompt: Mapping[str, object]
    tokens: list[int]
    text: str | None
    cum_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: None = None
    lora_request: None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @property
    def data(self) -> Any:
        """The vector as a tensor of torch, which vLLM's users read from what `LLM.encode` returns."""
        import torch

        return torch.tensor(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt: `.outputs.embedding`, or `.outputs.data`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


# vLLM's name of what `LLM.encode` returns.
PoolingRequestOutput = EmbeddingRequestOutput


def embedding_output(completion: Completion, prompt_token_ids: list[int]) -> EmbeddingRequestOutput:
    """Makes the result of `LLM.embed` from the client's."""
    found = PromptEmbedding.of(completion)
    output = EmbeddingOutput(list(found.values))
    return EmbeddingRequestOutput(found.request_id, output, prompt_token_ids, found.usage.cached_tokens)


def beam_search_output(
    completion: Completion, prompt: str | None, prompt_token_ids: list[int], texts: Iterator[str | None]
) -> BeamSearchOutput:
    """Makes the result of `LLM.beam_search` from the client's. The next `texts` are those of its hypotheses."""
    orig_prompt = {"type": "token", "prompt": prompt, "prompt_token_ids": prompt_token_ids}
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                orig_prompt=orig_prompt,
                tokens=[*prompt_token_ids, *output.token_ids],
                text=next(texts),
                cum_logprob=output.cumulative_logprob,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            )
            for output in completion.outputs
        ]
    )


def token_ids_of(completion: Completion) -> set[int]:
    """Returns all tokens that the log-probabilities of a result name."""
    entries = chain(completion.prompt_logprobs or (), *(output.logprobs or () for output in completion.outputs))
    return {token_id for entry in entries for token_id in (entry.token_id, *(top[0] for top in entry.top))}


def request_output(
    completion: Completion,
    prompt: str | None,
    prompt_token_ids: list[int],
    texts: Mapping[int, str],
    arrival_time: float,
    *,
    is_ranked: bool = True,
) -> RequestOutput:
    """Makes the result of `LLM` from the client's. `texts` are those of single tokens, as far as they are known. The
    tokens beside a chosen one are the most likely ones if `is_ranked`, else those that were asked for."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if completion.prompt_logprobs is not None:
        prompt_logprobs = [None, *_logprobs(completion.prompt_logprobs, texts)]
    return RequestOutput(
        request_id=completion.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_sample_output(output, texts, is_ranked=is_ranked) for output in completion.outputs],
        num_cached_tokens=completion.usage.cached_tokens,
        metrics=RequestMetrics(
            num_generation_tokens=completion.usage.completion_tokens,
            arrival_time=arrival_time,
            first_token_latency=completion.ttft_s,
            first_token_ts=completion.ttft_s,
            last_token_ts=None if completion.ttft_s is None else completion.total_s,
        ),
    )


def _joined(before: SampleOutput, after: SampleOutput) -> SampleOutput:
    logprobs = None if before.logprobs is None else [*before.logprobs, *(after.logprobs or ())]
    token_ids = [*before.token_ids, *after.token_ids]
    return replace(after, text=before.text + after.text, token_ids=token_ids, logprobs=logprobs)


def _sample_output(output: CompletionOutput, texts: Mapping[int, str], *, is_ranked: bool) -> SampleOutput:
    return SampleOutput(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else _logprobs(output.logprobs, texts, is_ranked=is_ranked),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _logprobs(
    entries: Iterable[TokenLogprobs], texts: Mapping[int, str], *, is_ranked: bool = True
) -> list[dict[int, Logprob]]:
    found = []
    for entry in entries:
        own = {entry.token_id: Logprob(entry.logprob, entry.rank, texts.get(entry.token_id))}
        others = {
            token_id: Logprob(logprob, place if is_ranked else None, texts.get(token_id))
            for place, (token_id, logprob) in enumerate(entry.top, 1)
        }
        found.append(own | others if is_ranked else own | others | own)
    return found
