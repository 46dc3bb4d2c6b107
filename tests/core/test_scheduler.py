"""The scheduler core with a simulated worker, in single cases and random histories."""

import random
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.common.wire.messages import (
    Candidates,
    Logprobs,
    Pooling,
    PromptLogprobs,
    RowStatus,
    SamplingParams,
    StepResult,
    WorkerProtocolError,
)
from scheduler_service.core import explain
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    EarlyStopping,
    EndReason,
    Request,
    TokenOutputs,
)
from testing.core.simulated_worker import reference, reference_embedding
from tests.core.system import VOCAB, System, capacity_of, prompt_of


@pytest.mark.one_of_each
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 63, 64, 65, 200])
def test_one_request_generates_what_the_reference_does(depth, length):
    system = System(depth=depth)
    (sequence_id,) = system.add(prompt_of(length), 20)
    system.join()
    system.run()
    assert system.tokens[sequence_id] == system.expected(sequence_id)
    assert system.ends[sequence_id] is EndReason.LENGTH


def test_a_length_stop_is_never_planned_past():
    system = System()
    system.add([1, 2, 3], max_tokens=5)
    system.join()
    system.run()
    assert system.num_plans == 5


def test_an_end_token_costs_one_late_token_at_depth_2():
    system = System()
    tokens = reference((1, 2, 3), 10, seed=0, sample_index=0, vocab_size=VOCAB)
    (sequence_id,) = system.add([1, 2, 3], 10, stop=[tokens[4]])
    system.join()
    system.run()
    assert system.tokens[sequence_id] == tokens[:5]
    assert system.ended[sequence_id].stop_token_id == tokens[4]
    assert system.num_plans == 6


def test_min_tokens_holds_an_end_token_off():
    system = System()
    tokens = reference((1, 2, 3), 10, seed=0, sample_index=0, vocab_size=VOCAB)
    (sequence_id,) = system.add([1, 2, 3], 10, stop=[tokens[2]], sampling={"min_tokens": 3})
    system.join()
    system.run()
    assert len(system.tokens[sequence_id]) > 3


def test_a_steady_plan_carries_nothing():
    system = System(num_blocks=200, block_size=16, max_num_seqs=32, budget=512)
    for i in range(32):
        system.add(prompt_of(10, i), 40)
    system.join()
    system.plan()
    system.complete()
    plans = []
    for _ in range(10):
        plans.append(system.plan())
        system.complete()
    quiet = [plan for plan in plans if not plan.append_tables]
    assert len(quiet) == 9  # blocks of 16: one block boundary in ten steps
    for plan in quiet[1:]:
        assert (plan.released_slots, plan.openings, plan.work_slots) == ((), (), ())


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows():
    system = System(budget=16)
    (short,) = system.add([5, 6], 30)
    system.join()
    system.plan()
    (long,) = system.add(prompt_of(100), 4)
    system.run()
    assert system.tokens[short] == system.expected(short)
    assert system.tokens[long] == system.expected(long)


def test_prompts_slow_decoding_within_the_configured_limit():
    """A worker computes 1,000 prompt tokens per second and decodes in 20 ms.

    A slowdown of 2 permits 20 prompt tokens beside the decoding rows.
    """
    system = System(budget=64, num_blocks=128, depth=1, max_decode_slowdown=2.0)
    system.join()
    system.add(prompt_of(150), 60)
    assert [system.timed_step(0.02) for _ in range(5)] == [64, 64, 22, 0, 0]
    system.add(prompt_of(100, 1), 4)
    assert [system.timed_step(0.02) for _ in range(6)] == [20, 20, 20, 20, 20, 0]
    system.run()
    system.assert_exact()


def test_step_without_decoding_rows_is_bounded():
    """A worker computes 1,000 prompt tokens per second and decodes in 2 ms. No step takes longer than 32 ms."""
    system = System(budget=64, num_blocks=128, depth=1, max_decode_slowdown=2.0)
    system.join()
    system.add(prompt_of(150), 3)
    assert [system.timed_step(0.002) for _ in range(5)] == [64, 64, 22, 0, 0]
    system.add(prompt_of(100, 1), 3)
    assert [system.timed_step(0.002) for _ in range(5)] == [30, 30, 30, 10, 0]
    system.run()
    system.assert_exact()


def test_budget_below_the_number_of_sequences_serves_all():
    system = System(budget=3, max_num_seqs=8)
    for i in range(8):
        system.add(prompt_of(5, i), 6)
    system.join()
    system.run()
    system.assert_exact()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_is_found_again_and_its_last_token_is_computed(depth):
    system = System(depth=depth)
    prompt = prompt_of(32)
    system.add(prompt, 4)
    system.join()
    system.run()
    (again,) = system.add(prompt, 4)
    (longer,) = system.add([*prompt, 7], 4)
    system.run()
    assert system.ended[again].num_cached_tokens == 28
    assert system.ended[longer].num_cached_tokens == 32
    system.assert_exact()


def test_a_prefix_is_found_within_the_plan_that_computes_it():
    system = System(budget=64)
    prompt = prompt_of(24)
    (first,), (second,) = system.add(prompt, 4, seed=1), system.add(prompt, 4, seed=2)
    system.join()
    plan = system.plan()
    assert [opening.num_computed_tokens for opening in plan.openings] == [0, 20]
    assert plan.openings[0].block_ids[:5] == plan.openings[1].block_ids[:5]
    system.run()
    assert system.tokens[first] == system.expected(first)
    assert system.tokens[second] == system.expected(second)
    assert system.tokens[first] != system.tokens[second]


def test_decoded_blocks_are_shared_too():
    system = System()
    (first,) = system.add([1, 2, 3], 14)
    system.join()
    system.run()
    (second,) = system.add([1, 2, 3, *system.tokens[first]], 4)
    system.run()
    assert system.ended[second].num_cached_tokens == 16
    system.assert_exact()


@pytest.mark.parametrize("field", ["tenant", "cache_salt"])
def test_tenants_and_salts_share_nothing(field):
    system = System()
    system.join()
    system.scheduler.add(Request("a", "", tuple(prompt_of(20)), SamplingParams(), 4), 0)
    system.tokens[0] = []
    system.run()
    request = Request(
        "b",
        **{"tenant": "", field: "x"},
        prompt_token_ids=tuple(prompt_of(20)),
        sampling=SamplingParams(),
        max_tokens=4,
    )
    (sequence_id,) = system.scheduler.add(request, 0)
    system.tokens[sequence_id] = []
    system.run()
    assert system.ended[sequence_id].num_cached_tokens == 0


def test_pressure_preempts_the_last_and_loses_nothing():
    system = System(num_blocks=12)
    for i in range(6):
        system.add(prompt_of(8, i), 20)
    system.join()
    system.run()
    system.assert_exact()
    num_preemptions = explain.stats(system.scheduler.state).num_preemptions
    assert num_preemptions > 0
    pauses = [end.pauses for end in system.ended.values()]
    assert sum(len(times) for times in pauses) == 2 * num_preemptions, "each began and ended"


def test_priority_then_arrival():
    system = System(max_num_seqs=1)
    ids = [system.add([i + 1], 3, priority=priority)[0] for i, priority in enumerate([1, 0, 1, -5])]
    system.join()
    system.run()
    assert list(system.ends) == [ids[3], ids[1], ids[0], ids[2]]


def test_what_can_never_fit_is_refused_exactly_at_the_limit():
    system = System(num_blocks=4)  # 16 positions; the last token needs no position
    system.join()
    system.add(prompt_of(10), 7)
    with pytest.raises(AdmissionError, match=r"together 18.*allows 17") as error:
        system.add(prompt_of(10), 8)
    assert error.value.reason is AdmissionReason.INVALID
    system.run()
    system.assert_exact()


def test_queue_caps_and_duplicates():
    system = System(max_waiting_requests=2, max_waiting_tokens=10)
    system.add([1] * 6, 2, request_id="a")
    with pytest.raises(AdmissionError) as error:
        system.add([1], 2, request_id="a")
    assert error.value.reason is AdmissionReason.DUPLICATE
    with pytest.raises(AdmissionError) as error:
        system.add([1] * 5, 2)
    assert error.value.reason is AdmissionReason.QUEUE_FULL
    system.add([1] * 4, 2)
    with pytest.raises(AdmissionError) as error:
        system.add([1], 2)
    assert error.value.reason is AdmissionReason.QUEUE_FULL
    system.join()
    system.run()


def test_a_worker_that_returns_smaller_ends_what_no_longer_fits():
    system = System()
    (large,) = system.add(prompt_of(100), 20)
    (small,) = system.add(prompt_of(10), 5)
    system.join()
    system.plan()
    system.lose()
    system.capacity = capacity_of(8)
    system.join()
    assert system.ends[large] is EndReason.NO_LONGER_FITS
    system.run()
    assert system.tokens[small] == system.expected(small)


def test_no_worker_for_too_long_ends_everything():
    system = System()
    (sequence_id,) = system.add([1], 2)
    system.take(system.scheduler.worker_timed_out(60.0))
    assert system.ends[sequence_id] is EndReason.NO_WORKER
    assert not system.scheduler.has_requests


def test_a_stop_text_drops_later_tokens():
    system = System()
    (sequence_id,) = system.add([1, 2], 20)
    system.join()
    for _ in range(6):
        system.plan()
        system.complete()
    system.plan()
    system.take(system.scheduler.stop(sequence_id, 4, 0.0))
    system.scheduler.check()
    assert system.ended[sequence_id].num_output_tokens == 4
    assert system.scheduler.stop(sequence_id, 4, 0.0) == TokenOutputs()
    system.run()


@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_come_once_through_chunks_preemption_and_recovery(budget):
    system = System(budget=budget, num_blocks=16)
    for i in range(3):
        system.add(prompt_of(20, i), 20, sampling={"num_prompt_logprobs": 0, "num_logprobs": 0})
    system.join()
    for _ in range(3):
        system.plan()
        system.complete()
    system.lose()
    system.join()
    system.run()
    for sequence_id, (request, _) in system.sequences.items():
        entries = system.prompt_logprobs[sequence_id]
        assert [entry.token_id for entry in entries] == list(request.prompt_token_ids[1:])
        assert [entry.logprob for entry in entries] == [-float(i) for i in range(1, 20)]
    system.assert_exact()


def test_results_that_do_not_answer_the_oldest_plan_are_refused():
    system = System()
    system.add([1, 2], 8)
    system.join()
    system.plan()
    system.complete()
    system.plan()
    good = system.results[0]
    for bad in (
        StepResult(good.epoch + 1, good.step, token_ids=good.token_ids),
        StepResult(good.epoch - 1, good.step, token_ids=good.token_ids),
        StepResult(good.epoch, good.step + 1, token_ids=good.token_ids),
        StepResult(good.epoch, good.step, token_ids=()),
        StepResult(good.epoch, good.step, token_ids=(1, 2)),
        StepResult(good.epoch, good.step, token_ids=(VOCAB,)),
        replace(good, logprobs=Logprobs((0.0,), (1,))),
        replace(good, candidates=Candidates((1,), (0.0,), (1,))),
        replace(good, embeddings=(bytes(4),)),
        replace(good, prompt_logprobs=(PromptLogprobs(0, 1, Logprobs()),)),
    ):
        with pytest.raises(WorkerProtocolError):
            system.scheduler.complete(bad, 0.0)
    system.run()
    with pytest.raises(WorkerProtocolError):
        system.scheduler.complete(good, 0.0)
    system.lose()
    with pytest.raises(WorkerProtocolError):
        system.scheduler.worker_joined(system.capacity, system.epoch, 0.0)


def test_bad_logits_end_one_request_and_those_on_its_blocks_are_redone():
    """Two requests share a prefix of 24 tokens, which the prompt of one continues with a poisoned token."""
    bad = VOCAB - 1
    system = System(poisoned=[bad], budget=128)
    shared = [token for token in prompt_of(40) if token != bad][:24]
    system.join()
    (poison,) = system.add([*shared, bad], 8, request_id="poison")
    (clean,) = system.add([*shared, 3, 4], 8, request_id="clean")
    (other,) = system.add([9, 8, 7], 8, request_id="other")
    system.run()
    assert system.ends[poison] is EndReason.NAN_LOGITS
    assert system.tokens[clean] == system.expected(clean)
    assert system.tokens[other] == system.expected(other)


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (RowStatus.NAN_LOGITS, EndReason.NAN_LOGITS, "not numbers"),
        (RowStatus.OUT_OF_MEMORY, EndReason.OUT_OF_MEMORY, "lower the worker's --gpu-memory-utilization"),
    ],
)
def test_a_row_that_fails_ends_its_request_and_those_on_its_blocks_are_redone(status, reason, text):
    system = System(budget=128)
    system.join()
    shared = prompt_of(24)
    (failing,) = system.add([*shared, 1], 8)
    (clean,) = system.add([*shared, 3, 4], 8)
    system.worker.bad_sequences = {failing: status}
    system.plan()  # both requests; the second uses blocks of the first
    outputs = system.scheduler.complete(system.results.popleft(), 0.0)
    (end,) = outputs.ended
    assert (end.sequence_id, end.reason) == (failing, reason)
    assert text in end.message
    system.take(outputs)
    assert explain.stats(system.scheduler.state).num_cached_blocks == 0
    system.run()
    assert system.tokens[clean] == system.expected(clean)


def test_blocks_of_bad_logits_are_unpublished():
    """The first block is poisoned. Followers match it within the same plan, so all of them use it."""
    system = System(poisoned=[VOCAB - 1], budget=128)
    system.join()
    (first,) = system.add([VOCAB - 1, *prompt_of(20)], 8)
    (second,) = system.add([VOCAB - 1, *prompt_of(20)], 8)
    system.plan()
    system.complete()
    system.scheduler.check()
    assert system.ends == {first: EndReason.NAN_LOGITS}  # the other request will fail by itself
    assert explain.stats(system.scheduler.state).num_cached_blocks == 0
    system.run()
    assert system.ends[second] is EndReason.NAN_LOGITS


def test_blocks_of_bad_logits_are_unpublished_though_their_request_has_gone():
    system = System(poisoned=[VOCAB - 1], budget=128)
    system.join()
    system.add([VOCAB - 1, *prompt_of(20)], 8, request_id="gone")
    system.plan()
    assert explain.stats(system.scheduler.state).num_cached_blocks == 5
    system.take(system.scheduler.abort("", "gone", 0.0))
    assert explain.stats(system.scheduler.state).num_cached_blocks == 5
    system.complete()
    assert explain.stats(system.scheduler.state).num_cached_blocks == 0
    system.scheduler.check()


def test_a_poison_request_among_64_fails_alone():
    system = System(num_blocks=400, max_num_seqs=64, budget=512)
    ids = [system.add(prompt_of(6, i), 6, request_id=f"r{i}")[0] for i in range(64)]
    poison = ids[random.Random(7).randrange(64)]
    crashes = 0
    system.join()
    for _ in range(3000):
        if not system.scheduler.has_requests:
            break
        plan = system.scheduler.schedule(0.0)
        if plan is not None:
            dispatched = {
                planned.row.sequence.sequence_id for planned in system.scheduler.state.worker.unacknowledged[-1].rows
            }
            columns = system.scheduler.state.worker.unacknowledged[-1].columns
            dispatched |= set(columns.sequence_ids)
            if poison in dispatched:
                crashes += 1
                system.lose()
                system.scheduler.check()
                system.join()
                continue
            system.results.append(system.worker.execute(plan))
        if system.results:
            system.complete()
            system.scheduler.check()
    assert system.ends[poison] is EndReason.CRASHES_WORKER
    assert crashes <= 3 + 6
    survivors = [sequence_id for sequence_id in ids if sequence_id != poison]
    assert [system.tokens[i] for i in survivors] == [system.expected(i) for i in survivors]


def most_blocks_of(window: int, block_size: int) -> int:
    """Return the largest number of blocks that `window` consecutive positions can touch."""
    return max(len({p // block_size for p in range(first, first + window)}) for first in range(block_size))


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts, stops, results, worker losses and poisoned tokens over tiny pools.

    Every output is checked.
    """

    @initialize(
        num_blocks=st.integers(4, 20),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        depth=st.integers(1, 3),
        caching=st.booleans(),
        poisoned=st.booleans(),
        num_host_blocks=st.sampled_from([0, 2, 6, 12]),
        windows=st.sampled_from([(0,), (0,), (1,), (3,), (8,), (0, 4), (0, 8, 3), (5, 2)]),
        delays_moves=st.booleans(),
        preemption=st.sampled_from(PreemptionMode),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, depth, caching, poisoned, **options):
        self.system = System(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=budget,
            depth=depth,
            enable_prefix_caching=caching,
            poisoned=[VOCAB - 1] if poisoned else [],
            **options,
        )
        self.system.join()

    @rule(
        length=st.integers(1, 20),
        shared=st.integers(0, 2),
        max_tokens=st.integers(1, 10),
        width=st.integers(1, 4),
        n=st.integers(1, 4),
        stop=st.booleans(),
        early=st.sampled_from(EarlyStopping),
    )
    def add_beams(self, length, shared, max_tokens, width, n, stop, early):
        stop_tokens = range(0, VOCAB, 20) if stop else ()
        with suppress(AdmissionError):
            self.system.add_beams(
                prompt_of(length, shared), max_tokens, width=width, n=min(n, width), stop=stop_tokens, early=early
            )

    @rule(
        length=st.one_of(st.integers(1, 30), st.integers(1, 150)),
        shared=st.integers(0, 2),
        max_tokens=st.one_of(st.integers(1, 20), st.integers(1, 60)),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        stop=st.booleans(),
        prompt_logprobs=st.booleans(),
        salt=st.sampled_from(["", "x"]),
    )
    def add(self, length, shared, max_tokens, n, priority, stop, prompt_logprobs, salt):
        stop_tokens = range(0, VOCAB, 9) if stop else ()
        sampling = {"num_prompt_logprobs": 0} if prompt_logprobs else {}
        size = self.system.capacity.block_size
        num_blocks, num_shared = -(-(length + max_tokens - 1) // size), (length - 1) // size
        num_most = num_blocks if n == 1 else num_shared + n * (num_blocks - num_shared)
        windows = self.system.capacity.windows
        num_most = sum(min(num_most, n * most_blocks_of(each, size)) if each else num_most for each in windows)
        fits = length + max_tokens <= self.system.scheduler.max_sequence_tokens
        fits = fits and (not self.system.worker or num_most <= self.system.capacity.num_device_blocks)
        with nullcontext() if fits else pytest.raises(AdmissionError, match=r"together|with n"):
            self.system.add(
                prompt_of(length, shared),
                max_tokens,
                n=n,
                priority=priority,
                stop=stop_tokens,
                seed=length,
                sampling=sampling,
                cache_salt=salt,
            )

    @rule(
        length=st.integers(1, 30),
        shared=st.integers(0, 2),
        pooling=st.sampled_from([Pooling.LAST, Pooling.MEAN]),
        priority=st.integers(-1, 1),
    )
    def add_embedding(self, length, shared, pooling, priority):
        with suppress(AdmissionError):
            self.system.add(prompt_of(length, shared), 0, priority=priority, sampling={"pooling": pooling})

    @precondition(lambda self: self.system.worker)
    @rule()
    def schedule(self):
        self.system.plan()

    @precondition(lambda self: self.system.results)
    @rule()
    def complete(self):
        self.system.complete()

    @precondition(lambda self: self.system.worker and self.system.worker.pending)
    @rule()
    def finish_move(self):
        self.system.finish_move()

    @precondition(lambda self: self.system.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data):
        live = list(self.system.scheduler.state.groups)
        tenant, request_id = data.draw(st.sampled_from(live))
        self.system.take(self.system.scheduler.abort(tenant, request_id, 0.0))

    @precondition(lambda self: self.system.scheduler.state.samples)
    @rule(data=st.data())
    def stop(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.system.scheduler.state.samples)))
        tokens = self.system.tokens[sequence_id]
        if tokens:
            num_tokens = data.draw(st.integers(1, len(tokens)))
            self.system.take(self.system.scheduler.stop(sequence_id, num_tokens, 0.0))

    @precondition(lambda self: self.system.worker)
    @rule()
    def lose(self):
        self.system.lose()

    @precondition(lambda self: not self.system.worker)
    @rule(num_blocks=st.integers(4, 20))
    def join(self, num_blocks):
        capacity = self.system.capacity
        self.system.capacity = capacity_of(
            num_blocks,
            capacity.block_size,
            capacity.max_num_seqs,
            capacity.max_num_batched_tokens,
            capacity.num_host_blocks,
            capacity.windows,
        )
        self.system.join()

    @invariant()
    def check(self):
        if hasattr(self, "system"):
            self.system.scheduler.check()

    def teardown(self):
        if hasattr(self, "system"):
            if not self.system.worker:
                self.system.join()
            self.system.run()
            for sequence_id, tokens in self.system.tokens.items():
                request, _ = self.system.sequences[sequence_id]
                is_beam = request.beam is not None
                if request.sampling.pooling is not Pooling.NONE and self.system.ends[sequence_id] is EndReason.STOP:
                    expected = reference_embedding(request.prompt_token_ids, request.sampling.pooling)
                    assert self.system.ended[sequence_id].embedding == expected
                if self.system.ends[sequence_id] is EndReason.LENGTH or (is_beam and tokens):
                    assert tokens == self.system.expected(sequence_id)
                else:
                    assert tokens == self.system.expected(sequence_id)[: len(tokens)]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking a history takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.thorough
class TestSchedulerMachineAtLength(TestSchedulerMachine):
    settings = settings(TestSchedulerMachine.settings, max_examples=150)
