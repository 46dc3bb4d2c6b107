"""Simulated clients, which compare their requests' outputs with the expected outputs (S6).

Each client reads the production code's output records. Every token is compared on arrival with a pure function that
computes the undisturbed output. Every end is checked against its stated reason, and nothing may follow an end.
"""

from collections.abc import Callable, Sequence

from pagewire.common.wire.messages import Pooling, RowStatus
from scheduler_service.core.request import EndReason, OutputMode, SequenceEnd, TokenLogprobs
from scheduler_service.serving.active_request import ActiveRequest, RequestEngine
from scheduler_service.serving.output import Delta, OutputReader, ReadyList, SampleRecord
from testing.core import beam_oracle
from testing.core.simulated_worker import digest, digest_all, next_token, reference_embedding
from testing.core.toy_grammar import constrained_token, is_readable, read
from tests.sim.scenario import VOCAB_SIZE, Arrival


class Client:
    """One request and the outputs of its sequences."""

    def __init__(
        self,
        arrival: Arrival,
        engine: RequestEngine,
        on_end: Callable[["Client"], None],
        ready_list: ReadyList | None = None,
        label: int = 0,
    ) -> None:
        """`on_end`: called when all outputs have ended."""
        self.arrival = arrival
        self.request = arrival.request
        self._on_end = on_end
        self.key = (arrival.request.tenant, arrival.request.request_id)
        self.outputs = [Output(self, index, label + index) for index in range(arrival.request.n)]
        self.active = ActiveRequest(self.request, [output.record for output in self.outputs], engine, ready_list)
        self.samples: dict[int, Output] = {}  # by sequence id
        self.num_live = arrival.request.n  # sequences that have not ended in the core
        self.num_lone_crashes = 0  # since one of its tokens was last confirmed
        self.num_preemptions_seen = 0
        self.is_aborted = self.is_abandoned = False
        self.may_be_bad = False
        self._expected_hypotheses: beam_oracle.Hypotheses | None = None

    def is_queued(self) -> None:
        self.samples = {output.record.sequence_id: output for output in self.outputs}
        assert len(self.samples) == self.request.n
        taken_in = any(output.record.num_published or output.record.is_over for output in self.outputs)
        assert not taken_in, "something came before the request was queued"
        self.active.listeners[self._read] = None

    def _read(self) -> None:
        for output in self.outputs:
            output.read()
        has_failed = any(output.record.failure is not None for output in self.outputs)
        assert has_failed or self.active.error is None, f"{self.active.error}"
        if all(output.end is not None for output in self.outputs):
            self.active.listeners = {}  # breaks the reference cycle between the client and its request
            self._on_end(self)

    @property
    def can_begin_elsewhere(self) -> bool:
        """Whether the request can restart elsewhere: its client waits for it, and no output was delivered."""
        if self.request.output_mode is OutputMode.STREAMED:
            return not any(output.num_confirmed or output.has_ended for output in self.outputs)
        return self.request.output_mode is OutputMode.WHOLE

    @property
    def expected_hypotheses(self) -> beam_oracle.Hypotheses:
        if self._expected_hypotheses is None:
            self._expected_hypotheses = beam_oracle.search(self.request, VOCAB_SIZE)
        return self._expected_hypotheses


class Output:
    """The output of one sequence."""

    def __init__(self, client: Client, index: int, label: int) -> None:
        self.client = client
        self.index = index
        sampling, beam = client.request.sampling, client.request.beam
        with_logprobs = sampling.num_logprobs is not None
        self.record = SampleRecord(index, label=label, with_logprobs=with_logprobs, is_hypothesis=beam is not None)
        self.reader = OutputReader(self.record)
        self.num_confirmed = 0  # tokens that the core has reported; the client may not have received them yet
        self.has_ended = False  # in the core
        self.num_stopped: int | None = None  # the number of tokens at which the core stopped the output
        self.num_read_at_stop = 0
        self.received: list[int] = []
        self.end: SequenceEnd | None = None
        self._prefix = digest_all(client.request.prompt_token_ids)
        self._num_logprobs = self._num_prompt_logprobs = 0
        self._must_end = False
        grammar = client.request.grammar
        self._matcher = None if grammar is None else read(grammar.text, grammar.end_token_ids, VOCAB_SIZE)

    def read(self) -> None:
        """Read all new deltas."""
        for delta in self.reader.take():
            self._take(delta)
        if self.record.failure is not None and self.end is None:
            self._finish(None)

    def _take(self, delta: Delta) -> None:
        assert self.end is None, "S6: something comes after the end"
        assert delta.first_token == len(self.received), "S6: a token is missing, or came twice"
        self._take_prompt_logprobs(delta.prompt_logprobs)
        if self.client.request.beam is None:
            self.add_tokens(delta.token_ids)
        else:
            assert not delta.token_ids or delta.end is not None, "S6: a token of a beam"
            self.received += delta.token_ids
        self._take_logprobs(delta.logprobs)
        if delta.end is not None:
            assert delta.end.num_output_tokens == len(self.received), "S6: the end is of other tokens"
            self._finish(delta.cumulative_logprob)

    def _finish(self, cumulative_logprob: float | None) -> None:
        self.end = self.record.published_end
        assert self.end is not None, "S6: an end that the engine has not told"
        self._check_end(self.end, cumulative_logprob)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        assert self.end is None, "S6: a token after the end"
        request, sampling = self.client.request, self.client.request.sampling
        for token_id in token_ids:
            assert not self._must_end, "a token after a stop token or beyond max_tokens"
            number, expected = len(self.received), self._expected_token()
            assert token_id == expected, f"token {number} of {self.client.key}/{self.index}: {token_id}, not {expected}"
            self._prefix = digest(self._prefix, token_id)
            self.received.append(token_id)
            stops = token_id in sampling.stop_token_ids and number + 1 > sampling.min_tokens
            if self._matcher is not None:
                self._matcher.consume((token_id,))
                stops = stops or token_id in self._matcher.end_token_ids
            self._must_end = stops or number + 1 == request.max_tokens
        assert len(self.received) <= self.num_confirmed, "a token that the core has not told"

    def _expected_token(self) -> int:
        request, matcher = self.client.request, self._matcher
        if matcher is None:
            return next_token(self._prefix, request.seed, self.index, VOCAB_SIZE)
        assert request.grammar is not None
        assert is_readable(request.grammar.text), "a token of a grammar that cannot be read"
        assert matcher.status is RowStatus.OK, "a token where the grammar has failed"
        return constrained_token(matcher, request.sampling, self._prefix, request.seed, self.index)

    def _take_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Check the log-probabilities of the latest tokens. The simulated worker encodes the tokens' number in them."""
        request = self.client.request
        for entry in entries:
            self._num_logprobs += 1
            assert entry.logprob == -float(len(request.prompt_token_ids) + self._num_logprobs)
        num_expected = len(self.received) if request.sampling.num_logprobs is not None else 0
        assert self._num_logprobs == num_expected, "S6: log-probabilities are not those of the tokens"

    def _take_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Check that the log-probability of each prompt token but the first arrives once and in order."""
        if not entries:
            return
        request = self.client.request
        assert request.sampling.num_prompt_logprobs is not None
        assert self.index == 0, "it was not asked for"
        first = self._num_prompt_logprobs + 1
        tokens = request.prompt_token_ids[first : first + len(entries)]
        found = [(entry.token_id, entry.logprob) for entry in entries]
        assert found == [(token_id, -float(first + i)) for i, token_id in enumerate(tokens)], "S6: of other tokens"
        self._num_prompt_logprobs += len(entries)

    def _check_end(self, end: SequenceEnd, cumulative_logprob: float | None) -> None:
        request, reason, client, num_received = self.client.request, end.reason, self.client, len(self.received)
        assert self.has_ended, "an end that the core has not told"
        assert end.num_prompt_tokens == len(request.prompt_token_ids)
        pooling = request.sampling.pooling
        is_embedded = pooling is not Pooling.NONE and reason is EndReason.STOP
        expected = reference_embedding(request.prompt_token_ids, pooling) if is_embedded else b""
        assert end.embedding == expected, f"the embedding of {request.request_id} is of other tokens"
        if pooling is not Pooling.NONE:
            assert num_received == 0, "a token of an embedding"
            assert reason is not EndReason.LENGTH
        if self.num_stopped is not None:
            assert (reason, end.num_output_tokens) == (EndReason.STOP, self.num_stopped)
            assert num_received == self.num_read_at_stop, "tokens come behind a stop text"
            return
        assert request.beam is not None or num_received == self.num_confirmed, "tokens are missing at the end"
        if reason in (EndReason.STOP, EndReason.LENGTH):
            self._check_whole(end, cumulative_logprob)
        elif reason is EndReason.ABORT:
            assert client.is_aborted, "it was not aborted"
        elif reason in (EndReason.GRAMMAR_FAILED, EndReason.GRAMMAR_DEAD_END, EndReason.GRAMMAR_LIMIT):
            assert request.grammar is not None, "the grammar of a request that has none"
            fault = request.grammar.text.split()[2]
            faults = {EndReason.GRAMMAR_LIMIT: ("limit",), EndReason.GRAMMAR_DEAD_END: ("dead_end",)}
            assert fault in faults.get(reason, ("failed", "unreadable")), f"ended by {reason} with the fault {fault}"
        elif reason is EndReason.NO_WORKER:
            assert client.is_abandoned, "the worker has not been away for long enough"
        elif reason in (EndReason.NAN_LOGITS, EndReason.OUT_OF_MEMORY):
            assert client.may_be_bad, "no row of it failed"
        elif reason is EndReason.CRASHES_WORKER:
            assert client.num_lone_crashes >= 2, f"S10: it crashed the worker alone {client.num_lone_crashes} times"

    def _check_whole(self, end: SequenceEnd, cumulative_logprob: float | None) -> None:
        """Check an output that has ended by itself."""
        request, num_received = self.client.request, len(self.received)
        if request.sampling.num_prompt_logprobs is not None and self.index == 0:
            num_owed = len(request.prompt_token_ids) - 1
            assert self._num_prompt_logprobs == num_owed, "prompt log-probabilities are missing"
        if request.beam is not None:
            self._check_hypothesis(end, cumulative_logprob)
        elif request.sampling.pooling is Pooling.NONE:
            assert self._must_end, f"ended by {end.reason} without a cause"
            assert end.num_output_tokens == num_received
            last, is_stop = self.received[-1], end.reason is EndReason.STOP
            stops = last in request.sampling.stop_token_ids and num_received > request.sampling.min_tokens
            is_end = request.grammar is not None and last in request.grammar.end_token_ids
            assert is_stop == (stops or is_end)
            assert end.stop_token_id == (last if is_stop else None)

    def _check_hypothesis(self, end: SequenceEnd, cumulative_logprob: float | None) -> None:
        found = (tuple(self.received), cumulative_logprob, end.stop_token_id)
        if self.index >= len(self.client.expected_hypotheses):
            assert self.client.request.grammar is not None, "hypotheses are missing"
            assert (found, end.reason) == (((), 0.0, None), EndReason.LENGTH)
            return
        expected = self.client.expected_hypotheses[self.index]
        assert found == expected, (
            f"hypothesis {self.index} of {self.client.request.request_id}: {found}, not {expected}"
        )
        assert end.num_output_tokens == len(expected[0])
        assert end.reason is (EndReason.LENGTH if expected[2] is None else EndReason.STOP)
