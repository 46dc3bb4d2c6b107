"""Requests with a grammar: which requests wait for it, which do not, and how they end."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest

from pagewire.common.wire.messages import (
    GrammarKind,
    LayerGroup,
    Logprobs,
    RowStatus,
    SamplingParams,
    StepResult,
    WorkerCapacity,
    WorkerProtocolError,
)
from scheduler_service.core import explain
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.plans.dispatch import _read_logprobs
from scheduler_service.core.request import AdmissionError, EndReason, Grammar, Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from testing.core.simulated_worker import SimulatedWorker

GRAMMAR = Grammar(GrammarKind.REGEX, "a+", (2,))
CAPACITY = WorkerCapacity(
    worker_id="w",
    model_digest=b"m",
    vocab_size=97,
    max_model_len=64,
    block_size=4,
    num_device_blocks=40,
    block_bytes=1000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    device="cpu",
    dtype="float32",
    attention_backend="none",
    grammar_version="g",
)


def joined(capacity: WorkerCapacity = CAPACITY, **limits: object) -> Scheduler:
    options = SchedulerOptions(4, 64, 64, grammar_version="g", **{"policy": "priority"} | limits)
    scheduler = Scheduler(options)
    scheduler.worker_joined(capacity, 1, 0.0)
    return scheduler


def request(name: str, grammar: Grammar | None = GRAMMAR) -> Request:
    return Request(name, "t", (1, 3, 4), SamplingParams(), 4, grammar=grammar)


def test_no_group_waits_for_the_grammar_of_another():
    scheduler = joined()
    scheduler.add(request("constrained"), 0.0)
    scheduler.add(request("free", None), 0.0)
    plan = scheduler.schedule(0.0)
    assert [(added.grammar_id, added.text) for added in plan.added_grammars] == [(1, "a+")]
    assert [opening.grammar_id for opening in plan.openings] == [0]
    report = explain.report(scheduler.state, "t", "constrained")
    assert (report.state, report.reason) == ("waiting", "its grammar is being prepared by the worker")
    assert not scheduler.grammar_ready(1, "", 0.0).ended
    scheduler.check()
    assert [opening.grammar_id for opening in scheduler.schedule(0.0).openings] == [1]


def test_a_grammar_is_announced_by_a_plan_with_nothing_else_and_released_after_its_last_request():
    scheduler = joined()
    scheduler.add(request("a"), 0.0)
    scheduler.add(request("b"), 0.0)
    plan = scheduler.schedule(0.0)
    assert len(plan.added_grammars) == 1
    assert not plan.openings
    scheduler.abort("t", "a", 0.0)
    scheduler.abort("t", "b", 0.0)
    scheduler.add(request("c", None), 0.0)
    assert scheduler.schedule(0.0).released_grammar_ids == (1,)
    assert not scheduler.grammar_ready(1, "too late", 0.0).ended
    with pytest.raises(WorkerProtocolError, match="grammar 2 is reported"):
        scheduler.grammar_ready(2, "", 0.0)


def test_a_grammar_that_cannot_be_read_ends_all_that_need_it():
    scheduler = joined()
    scheduler.add(request("a"), 0.0)
    scheduler.add(request("b"), 0.0)
    scheduler.schedule(0.0)
    ends = scheduler.grammar_ready(1, "no such thing", 0.0).ended
    assert [(end.reason, end.message) for end in ends] == [
        (EndReason.GRAMMAR_FAILED, "the worker cannot read the grammar: no such thing")
    ] * 2
    scheduler.check()


@pytest.mark.parametrize("version", ["", "another"])
def test_worker_with_another_grammar_version_gets_no_grammars(version: str):
    scheduler = joined()
    scheduler.add(request("constrained"), 0.0)
    scheduler.add(request("free", None), 0.0)
    scheduler.worker_lost(0.0)
    ends = scheduler.worker_joined(replace(CAPACITY, grammar_version=version), 2, 0.0).ended
    assert [(end.sequence_id, end.reason) for end in ends] == [(0, EndReason.NO_LONGER_FITS)]
    with pytest.raises(AdmissionError) as refused:
        scheduler.add(request("another"), 0.0)
    assert refused.value.field == "sampling.structured_output"


def test_queue_counts_requests_with_grammar_in_preparation():
    scheduler = joined(max_waiting_tokens=5)
    scheduler.add(request("a"), 0.0)
    with pytest.raises(AdmissionError, match="3 prompt tokens are queued, with this request 6, the limit is 5"):
        scheduler.add(request("b", None), 0.0)


def test_prompt_log_probabilities_outlive_a_swap_that_drops_the_sample_beside_them():
    """A gated row is swapped out while the step that computes its prompt and its sample is in flight.

    The sample is computed again, but no position of the prompt is computed twice.
    """
    capacity = replace(CAPACITY, num_device_blocks=4, num_host_blocks=8, swap_bandwidth=1e9, gates_grammars=True)
    scheduler = joined(capacity, watermark=0.0, preemption=PreemptionMode.SWAP)
    worker = SimulatedWorker(4, 4, 97, 4, 64, num_host_blocks=8, gates_grammars=True)
    toy = Grammar(GrammarKind.REGEX, "7 9 none 0", (2,))
    constrained = Request("b", "t", (5, 6, 7, 8, 9, 10, 11), SamplingParams(num_prompt_logprobs=0), 3, grammar=toy)
    scheduler.add(constrained, 0.0)
    worker.execute(scheduler.schedule(0.0))
    scheduler.complete(StepResult(1, 1), 0.0)
    scheduler.grammar_ready(1, worker.prepare(1), 0.0)
    scheduler.add(replace(constrained, request_id="a", prompt_token_ids=(3,) * 8, priority=-1, grammar=None), 0.0)
    told = []
    results = deque()
    while scheduler.has_requests:
        while (plan := scheduler.schedule(0.0)) is not None:
            results.append(worker.execute(plan))
        scheduler.moved(results[0].last_moved_step, 0.0)
        outputs = scheduler.complete(results.popleft(), 0.0)
        scheduler.check()
        told += [entry.token_id for entry in outputs.prompt_logprobs.get(0, ())]
    assert explain.stats(scheduler.state).num_swap_preemptions == 1
    assert told == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("num_bad", [1, 5])
def test_a_grammar_that_crashes_the_worker_ends_its_requests_alone(num_bad: int):
    """The grammar is found among others, each of which loses a few workers. All requests that need it end at once."""
    scheduler, bad = joined(), Grammar(GrammarKind.REGEX, "bad", (2,))
    for number in range(num_bad):
        scheduler.add(request(f"bad{number}", bad), 0.0)
    for number in range(6):
        scheduler.add(request(f"good{number}", Grammar(GrammarKind.REGEX, f"g{number}", (2,))), 0.0)
    ends, epoch = [], 1
    while not ends:
        plan = scheduler.schedule(0.0)
        for added in plan.added_grammars if plan else ():
            if added.text == "bad":
                scheduler.check()
                ends = scheduler.worker_lost(0.0).ended
                epoch += 1
                assert epoch <= 1 + 3 + 3, "one among seven is found by log2(7) + 3 crashes"
                scheduler.worker_joined(CAPACITY, epoch, 0.0)
                break
        else:
            for added in plan.added_grammars if plan else ():
                scheduler.grammar_ready(added.grammar_id, "", 0.0)
            if plan and plan.openings:
                tokens = (2,) * sum(count > 0 for count in plan.work_num_tokens)
                scheduler.complete(StepResult(epoch, plan.step, token_ids=tokens), 0.0)
            elif plan:
                scheduler.complete(StepResult(epoch, plan.step), 0.0)
    assert [end.reason for end in ends] == [EndReason.CRASHES_WORKER] * num_bad
    assert "prepared its grammar" in ends[0].message
    assert not any(name.startswith("bad") for _, name in scheduler.state.groups)


def running(policy: str = "fair", num: int = 1) -> Scheduler:
    """Return a scheduler with `num` requests whose grammar is ready, and with two plans in flight."""
    scheduler = joined(policy=policy)
    for number in range(num):
        scheduler.add(request(f"r{number}"), 0.0)
    assert scheduler.schedule(0.0).added_grammars
    scheduler.grammar_ready(1, "", 0.0)
    scheduler.complete(StepResult(1, 1), 0.0)
    assert len(scheduler.schedule(0.0).openings) == num
    assert scheduler.schedule(0.0) is not None
    return scheduler


@pytest.mark.parametrize("num_late", [1, 2, 5])
def test_a_late_row_gives_its_tokens_by_as_many_plans_more(num_late: int):
    """The row is late at its first token and at its last token. A plan describes a late row like any other row."""
    scheduler = running()
    late, ok = (RowStatus.LATE,), ()
    tokens: list[int] = []
    ended, step = [], 2
    for statuses in [late] * num_late + [ok] * 3 + [late] * num_late + [ok]:
        scheduler.check()
        outputs = scheduler.complete(
            StepResult(1, step, statuses=statuses, token_ids=() if statuses else (step,)), 0.5 * step
        )
        tokens += outputs.token_ids
        ended += outputs.ended
        step += 1
        if not ended:
            plan = scheduler.schedule(0.5 * step)
            assert plan is None or not plan.openings
    assert tokens == [2 + num_late, 3 + num_late, 4 + num_late, 5 + 2 * num_late]
    assert [end.reason for end in ended] == [EndReason.LENGTH]
    assert ended[0].first_token_at == 0.5 * (2 + num_late)


def test_the_time_of_masks_is_charged_as_prompt_tokens_are():
    scheduler = running()
    epoch = scheduler.state.worker
    epoch.cost.prefill_rate = 1000.0  # tokens per second
    before = scheduler._policy.rank("t")
    for step in (2, 3):
        result = StepResult(1, step, token_ids=(5,), mask_slots=(0,), mask_us=(3500,))
        scheduler.complete(result, 0.0)
    assert scheduler._policy.rank("t") - before == 7, "what is less than a token is kept"


@pytest.mark.parametrize(("slots", "us"), [((0,), ()), ((0, 0), (1, 1)), ((3,), (1,))])
def test_times_of_masks_that_no_row_has_break_the_protocol(slots: tuple[int, ...], us: tuple[int, ...]):
    scheduler = running()
    with pytest.raises(WorkerProtocolError, match="mask times"):
        scheduler.complete(StepResult(1, 2, token_ids=(5,), mask_slots=slots, mask_us=us), 0.0)


def test_tokens_that_a_grammar_does_not_allow_are_not_among_the_most_likely() -> None:
    columns = Logprobs((-0.5, -0.1), (1, 1), (7, 8, 9, 3, 4, 5), (-0.5, -inf, -inf, -0.1, -2.5, -inf))
    first, second = _read_logprobs(columns, [(7, 3, False), (3, 3, False)], 97)
    assert first.top == ((7, -0.5),)
    assert second.top == ((3, -0.1), (4, -2.5))
    (listed,) = _read_logprobs(Logprobs((-0.5,), (1,), (8, 7), (-inf, -0.5)), [(7, 2, True)], 97)
    assert listed.top == ((7, -0.5), (8, -inf)), "the token itself comes first, and each that was listed"


def constrained_tokens(text: str, window: int, is_late: Callable[[int, int], bool]) -> list[int]:
    """Return the tokens of a request with a toy grammar, with prefix caching disabled.

    No row has a block allocated ahead of its next plans.
    """
    scheduler = joined(replace(CAPACITY, layer_groups=(LayerGroup(window),)), enable_prefix_caching=False)
    worker = SimulatedWorker(40, 4, 97, 4, 64, windows=(window,), is_late=is_late)
    grammar = Grammar(GrammarKind.REGEX, text, (2,))
    scheduler.add(Request("r", "t", (1, 3, 4), SamplingParams(), 40, grammar=grammar), 0.0)
    results = deque([worker.execute(scheduler.schedule(0.0))])
    scheduler.grammar_ready(1, worker.prepare(1), 0.0)
    tokens: list[int] = []
    while scheduler.has_requests:
        while (plan := scheduler.schedule(0.0)) is not None:
            results.append(worker.execute(plan))
        for sequence in scheduler.state.samples.values():
            assert len(sequence.allocation.tables[0].blocks) <= -(-(sequence.allocation.num_computed_tokens + 2) // 4)
        tokens += scheduler.complete(results.popleft(), 0.0).token_ids
        scheduler.check()
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_late_rows_of_a_sliding_window_get_the_same_tokens(seed: int):
    print("seed", seed)
    rng = Random(seed)
    late, window = [rng.random() < 0.6 for _ in range(400)], rng.randint(1, 3)
    texts = [f"{rng.randrange(10**6)} 40 none 0" for _ in range(100)]
    expected = [(constrained_tokens(text, window, lambda num_tokens, step: False), text) for text in texts]
    tokens, text = max(expected, key=lambda each: len(each[0]))
    assert len(tokens) > 12
    assert constrained_tokens(text, window, lambda num_tokens, step: late[step]) == tokens
