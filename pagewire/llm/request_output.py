"""The results of `LLM`, with the attributes of vLLM's results and the keys of nano-vllm's."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pagewire.client.completion import Completion, CompletionOutput, PromptEmbedding, TokenLogprobs

# The keys of nano-vllm's results.
KEYS = ("text", "token_ids")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log-probability of one token, as in vLLM's results. It is computed after penalties and bias, and
    before temperature and filters.

    `rank` counts from 1. It is None for a token of `logprob_token_ids` that was not sampled. `decoded_token` is None if
    the checkpoint has no tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The generated output of one sample of a prompt, or one beam search hypothesis.

    `logprobs` has a dict for each output token. The dict contains the sampled token and the most likely tokens by token
    id.
    """

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
    """The timing of one request, as in vLLM's results.

    `arrival_time` is the Unix time, in seconds, at which the method of `LLM` was called. The other times are in seconds
    since the request was sent. They are None if no token was generated.
    """

    num_generation_tokens: int
    arrival_time: float
    first_token_latency: float | None
    first_token_ts: float | None
    last_token_ts: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of `LLM.generate` for one prompt.

    Read the text as `.outputs[0].text`. `["text"]` and `["token_ids"]` return the values of the first sample. `prompt`
    is None for a prompt of token ids. The first entry of `prompt_logprobs` is None. Attributes of vLLM's results that
    Pagewire does not support are None.
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
        """Merge the samples of another result of the same request into this result.

        A sample with a new index is appended. A sample with a known index replaces the existing sample, or extends it
        if `aggregate`.
        """
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
    """One hypothesis of beam search: a candidate for the continuation of the prompt.

    As in vLLM, `tokens` and `text` begin with the prompt. `text` is None if the checkpoint has no tokenizer.
    """

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
    """The result of `LLM.beam_search` for one prompt: the hypotheses, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding vector of a prompt, normalized to length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @property
    def data(self) -> Any:
        """The embedding as a torch tensor, as in the results of vLLM's `LLM.encode`."""
        import torch

        return torch.tensor(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt. The embedding is `.outputs.embedding`, a list of numbers, or
    `.outputs.data`, a torch tensor."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


# vLLM's name for the result of `LLM.encode`.
PoolingRequestOutput = EmbeddingRequestOutput


def embedding_output(completion: Completion, prompt_token_ids: list[int]) -> EmbeddingRequestOutput:
    """Convert the completion of an embedding request, as the client returns it, to a result of `LLM.embed`."""
    found = PromptEmbedding.of(completion)
    output = EmbeddingOutput(list(found.values))
    return EmbeddingRequestOutput(found.request_id, output, prompt_token_ids, found.usage.cached_tokens)


def beam_search_output(
    completion: Completion, prompt: str | None, prompt_token_ids: list[int], texts: Iterator[str | None]
) -> BeamSearchOutput:
    """Convert the completion of a beam search request, as the client returns it, to a result of `LLM.beam_search`.

    `texts` yields the text of each hypothesis. This function reads one text for each output of the completion.
    """
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
    """Return all token ids that appear in the log-probabilities of a completion, so that their texts can be looked
    up."""
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
    """Convert the completion of a generation request, as the client returns it, to a result of `LLM.generate`.

    `texts` maps token ids to the texts of single tokens, where known. If `is_ranked`, the tokens listed next to a
    sampled token are the most likely tokens. Otherwise, they are the tokens that the request named.
    """
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
