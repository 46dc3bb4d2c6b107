"""What a client sees of its request, held against what it must see (S6).

Tokens go through the production `TokenStream`. Every token is compared as it comes with the pure function that an
undisturbed run is, every end with the reason it claims.
"""

from scheduler_service.core.plan import Pooling, RowStatus
from scheduler_service.core.request import EndReason, Hypothesis, OutputMode, SequenceEnd, TokenLogprobs
from scheduler_service.serving.token_stream import Delta, TokenStream
from tests.core.simulated_worker import digest, digest_all, next_token, reference_embedding
from tests.core.toy_grammar import constrained_token, is_readable, read
from tests.sim import beam_oracle
from tests.sim.scenario import VOCAB_SIZE, Arrival


def _unused(delta: Delta) -> None:
    raise AssertionError("a stream delivered by itself")


class Client:
    """One request and the streams of its sequences."""

    def __init__(self, arrival: Arrival, sequence_ids: list[int], now: float) -> None:
        request = arrival.request
        assert len(sequence_ids) == len(set(sequence_ids)) == request.n
        self.arrival = arrival
        self.request = request
        self.key = (request.tenant, request.request_id)
        self.samples = {
            sequence_id: _Sample(self, TokenStream(request, index, _unused, now), index)
            for index, sequence_id in enumerate(sequence_ids)
        }
        self.num_live = request.n
        self.num_lone_crashes = 0  # since a token of it was last confirmed
        self.num_preemptions_seen = 0
        self.is_aborted = self.is_abandoned = False
        self.may_be_bad = False
        self._expected_hypotheses: beam_oracle.Hypotheses | None = None

    @property
    def can_begin_elsewhere(self) -> bool:
        """Nobody has had anything of its output, and somebody waits for it now."""
        if self.request.output_mode is OutputMode.STREAMED:
            return not any(sample.stream.num_published or sample.end for sample in self.samples.values())
        return self.request.output_mode is OutputMode.WHOLE

    @property
    def expected_hypotheses(self) -> beam_oracle.Hypotheses:
        if self._expected_hypotheses is None:
            self._expected_hypotheses = beam_oracle.search(self.request, VOCAB_SIZE)
        return self._expected_hypotheses


class _Sample:
    """The output of one sequence."""

    def __init__(self, client: Client, stream: TokenStream, index: int) -> None:
        self.client = client
        self.stream = stream
        self.index = index
        self.received: list[int] = []
        self.end: SequenceEnd | None = None
        self._prefix = digest_all(client.request.prompt_token_ids)
        self._num_logprobs = self._num_prompt_logprobs = 0
        self._must_end = False
        grammar = client.request.grammar
        self._matcher = None if grammar is None else read(grammar.text, grammar.end_token_ids, VOCAB_SIZE)
        self._hypothesis: Hypothesis | None = None

    def token(self, token_id: int, now: float) -> None:
        request = self.client.request
        assert request.beam is None, "S6: a token of a beam"
        assert not self._must_end, "a token after a stop token or beyond max_tokens"
        expected = self._expected_token()
        number = self.stream.num_published
        assert token_id == expected, f"token {number} of {request.request_id}/{self.index}: {token_id}, not {expected}"
        self._prefix = digest(self._prefix, token_id)
        self.stream.publish(token_id, now)
        sampling = request.sampling
        stops = token_id in sampling.stop_token_ids and number + 1 > sampling.min_tokens
        if self._matcher is not None:
            self._matcher.consume((token_id,))
            stops = stops or token_id in self._matcher.end_token_ids
        self._must_end = stops or number + 1 == request.max_tokens
        if len(self.stream.token_ids) >= self.client.arrival.reads_every:
            self.read()

    def _expected_token(self) -> int:
        request, matcher = self.client.request, self._matcher
        if matcher is None:
            return next_token(self._prefix, request.seed, self.index, VOCAB_SIZE)
        assert request.grammar is not None
        assert is_readable(request.grammar.text), "a token of a grammar that cannot be read"
        assert matcher.status is RowStatus.OK, "a token where the grammar has failed"
        return constrained_token(matcher, request.sampling, self._prefix, request.seed, self.index)

    def logprob(self, entry: TokenLogprobs) -> None:
        """Of the token that has just come. The simulated worker says how many tokens there were."""
        request = self.client.request
        assert request.sampling.num_logprobs is not None, "nobody asked for it"
        self._num_logprobs += 1
        assert entry.logprob == -float(len(request.prompt_token_ids) + self._num_logprobs)
        assert self._num_logprobs == self.stream.num_published, "S6: a log-probability without its token"

    def prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Of each prompt token but the first, once and in order."""
        request = self.client.request
        assert request.sampling.num_prompt_logprobs is not None
        assert self.index == 0, "nobody asked for it"
        assert self.end is None, "S6: prompt log-probabilities after the end"
        first = self._num_prompt_logprobs + 1
        tokens = request.prompt_token_ids[first : first + len(entries)]
        found = [(entry.token_id, entry.logprob) for entry in entries]
        assert found == [(token_id, -float(first + i)) for i, token_id in enumerate(tokens)], "S6: of other tokens"
        self._num_prompt_logprobs += len(entries)

    def hypothesis(self, hypothesis: Hypothesis) -> None:
        assert self._hypothesis is None, "S6: a hypothesis twice"
        self._hypothesis = hypothesis

    def read(self) -> None:
        delta = self.stream.take()
        assert delta.first_token == len(self.received), "S6: a token is missing, or came twice"
        self.received += delta.token_ids

    def finish(self, end: SequenceEnd) -> None:
        assert self.end is None, "S6: two ends"
        self.end = end
        self.client.num_live -= 1
        if self._hypothesis is not None:
            for token_id in self._hypothesis.token_ids:
                self.stream.publish(token_id, 0.0)
        num_published = self.stream.num_published
        self.stream.finish(end)
        self.read()
        self._check_reason(end, num_published)

    def _check_reason(self, end: SequenceEnd, num_published: int) -> None:
        request, reason, client = self.client.request, end.reason, self.client
        assert end.num_prompt_tokens == len(request.prompt_token_ids)
        pooling = request.sampling.pooling
        is_embedded = pooling is not Pooling.NONE and reason is EndReason.STOP
        expected = reference_embedding(request.prompt_token_ids, pooling) if is_embedded else b""
        assert end.embedding == expected, f"the embedding of {request.request_id} is of other tokens"
        if pooling is not Pooling.NONE:
            assert num_published == 0, "a token of an embedding"
            assert reason is not EndReason.LENGTH
        if reason in (EndReason.STOP, EndReason.LENGTH):
            if request.sampling.num_prompt_logprobs is not None and self.index == 0:
                assert self._num_prompt_logprobs == len(request.prompt_token_ids) - 1, (
                    "prompt log-probabilities are missing"
                )
            if request.beam is not None:
                self._check_hypothesis(end)
            elif end.stop_token_id is not None or reason is EndReason.LENGTH:
                assert self._must_end, f"ended by {reason} without a cause"
                assert end.num_output_tokens == num_published
                is_stop = reason is EndReason.STOP
                stops = self.received[-1] in request.sampling.stop_token_ids and (
                    num_published > request.sampling.min_tokens
                )
                is_end = request.grammar is not None and self.received[-1] in request.grammar.end_token_ids
                assert is_stop == (stops or is_end)
                assert end.stop_token_id == (self.received[-1] if is_stop else None)
        elif reason is EndReason.ABORT:
            assert client.is_aborted, "nobody aborted it"
        elif reason in (EndReason.GRAMMAR_FAILED, EndReason.GRAMMAR_LIMIT):
            assert request.grammar is not None, "the grammar of a request that has none"
            fault = request.grammar.text.split()[2]
            faults = ("limit",) if reason is EndReason.GRAMMAR_LIMIT else ("failed", "unreadable")
            assert fault in faults, f"ended by {reason} with the fault {fault}"
        elif reason is EndReason.NO_WORKER:
            assert client.is_abandoned, "the worker has not been away for long enough"
        elif reason in (EndReason.NAN_LOGITS, EndReason.OUT_OF_MEMORY):
            assert client.may_be_bad, "no row of it failed"
        elif reason is EndReason.CRASHES_WORKER:
            assert client.num_lone_crashes >= 2, f"S10: it crashed the worker alone {client.num_lone_crashes} times"

    def _check_hypothesis(self, end: SequenceEnd) -> None:
        if self.index >= len(self.client.expected_hypotheses):
            assert self.client.request.grammar is not None, "hypotheses are missing"
            assert (self._hypothesis, end.reason, end.num_output_tokens) == (None, EndReason.LENGTH, 0)
            return
        expected = self.client.expected_hypotheses[self.index]
        assert self._hypothesis is not None, "a beam ended without its tokens"
        found = (self._hypothesis.token_ids, self._hypothesis.cumulative_logprob, end.stop_token_id)
        assert found == expected, (
            f"hypothesis {self.index} of {self.client.request.request_id}: {found}, not {expected}"
        )
        assert end.num_output_tokens == len(expected[0])
        assert end.reason is (EndReason.LENGTH if expected[2] is None else EndReason.STOP)
