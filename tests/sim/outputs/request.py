"""A simulated request and its expected output.

The output must equal the output of the request alone, whatever happens around it.
"""

from dataclasses import dataclass
from functools import cached_property

from pagewire.common.wire.messages import SamplingParams
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.core.request import BeamParams, EarlyStopping, EndReason, Request
from testing.core import beam_oracle
from testing.core.simulated_worker import reference
from tests.sim.outputs.toy_tokenizer import text_of, tokens_of
from tests.sim.scenario import BAD_TOKEN, VOCAB_SIZE

EOS = 5


@dataclass(frozen=True, slots=True)
class Output:
    """The whole output of one sample."""

    token_ids: tuple[int, ...]
    text: str
    reason: EndReason
    stop_token_id: int | None = None
    stop_text: str | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class SimulatedRequest:
    name: str
    tenant: str
    prompt: tuple[int, ...] | str
    max_tokens: int
    seed: int
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    includes_stop: bool = False
    ignores_eos: bool = True
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    beam_width: int | None = None
    is_invalid: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.name

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(tokens_of(self.prompt)) if isinstance(self.prompt, str) else self.prompt

    @property
    def is_bad(self) -> bool:
        """Whether the request's logits are invalid."""
        return BAD_TOKEN in self.prompt_ids

    @property
    def message(self) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed,
            n=self.n,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            min_tokens=self.min_tokens,
            include_stop_str_in_output=self.includes_stop,
            ignore_eos=self.ignores_eos,
            logprobs=0 if self.has_logprobs else None,
            prompt_logprobs=0 if self.has_prompt_logprobs else None,
            beam_width=self.beam_width,
            temperature=-1.0 if self.is_invalid else None,
        )
        message = pb.GenerateRequest(request_id=self.name, tenant=self.tenant, sampling=sampling)
        if isinstance(self.prompt, str):
            message.text = self.prompt
        else:
            message.token_ids.ids.extend(self.prompt)
        return message

    @cached_property
    def outputs(self) -> list[Output]:
        """The expected output of each sample."""
        return self._hypotheses() if self.beam_width is not None else [self._sample(i) for i in range(self.n)]

    @property
    def _stops(self) -> set[int]:
        return {*self.stop_token_ids} if self.ignores_eos else {*self.stop_token_ids, EOS}

    def undisturbed(self, index: int, num_tokens: int) -> list[int]:
        """Return the first tokens of a sample, ignoring everything that would end it."""
        return reference(self.prompt_ids, num_tokens, seed=self.seed, sample_index=index, vocab_size=VOCAB_SIZE)

    def _sample(self, index: int) -> Output:
        tokens, text = self.undisturbed(index, self.max_tokens), ""
        for count, token_id in enumerate(tokens, 1):
            output, is_stop = tuple(tokens[:count]), token_id in self._stops and count > self.min_tokens
            if not is_stop or self.includes_stop:
                text += text_of([token_id])
                if found := self._find_stop(text):
                    start, stop_text = found
                    end = start + len(stop_text) if self.includes_stop else start
                    return Output(output, text[:end], EndReason.STOP, stop_text=stop_text)
            if is_stop:
                return Output(output, text, EndReason.STOP, stop_token_id=token_id)
        return Output(tuple(tokens), text, EndReason.LENGTH)

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self.stop if stop in text]
        return min(found, key=lambda each: each[0], default=None)

    def _hypotheses(self) -> list[Output]:
        assert self.beam_width is not None
        request = Request(
            request_id=self.name,
            tenant="",
            prompt_token_ids=self.prompt_ids,
            sampling=SamplingParams(stop_token_ids=tuple(sorted(self._stops)), min_tokens=self.min_tokens),
            max_tokens=self.max_tokens,
            seed=self.seed,
            n=self.n,
            beam=BeamParams(self.beam_width, 1.0, EarlyStopping.HEURISTIC),
        )
        outputs = []
        for token_ids, logprob, stop in beam_oracle.search(request, VOCAB_SIZE):
            text = text_of(token_ids if stop is None or self.includes_stop else token_ids[:-1])
            reason = EndReason.LENGTH if stop is None else EndReason.STOP
            outputs.append(Output(token_ids, text, reason, stop, cumulative_logprob=logprob))
        return outputs
