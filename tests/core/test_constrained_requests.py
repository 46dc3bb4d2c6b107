"""Requests with a grammar: who waits for it, who does not, and what becomes of them."""

from collections import deque
from dataclasses import replace

import pytest

from scheduler_service.core import explain
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.plan import Grammar, GrammarKind, SamplingParams, StepResult, WorkerCapacity
from scheduler_service.core.request import AdmissionError, EndReason, Request
from scheduler_service.core.scheduler import Scheduler, WorkerProtocolError
from tests.core.simulated_worker import SimulatedWorker

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
    scheduler = Scheduler(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, grammar_version="g", **limits)
    scheduler.worker_joined(capacity, 1, 0.0)
    return scheduler


def request(name: str, grammar: Grammar | None = GRAMMAR) -> Request:
    return Request(name, "t", (1, 3, 4), SamplingParams(), 4, grammar=grammar)


def test_nobody_waits_for_another_ones_grammar():
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
def test_a_worker_that_reads_grammars_otherwise_gets_none(version: str):
    scheduler = joined()
    scheduler.add(request("constrained"), 0.0)
    scheduler.add(request("free", None), 0.0)
    scheduler.worker_lost(0.0)
    ends = scheduler.worker_joined(replace(CAPACITY, grammar_version=version), 2, 0.0).ended
    assert [(end.sequence_id, end.reason) for end in ends] == [(0, EndReason.NO_LONGER_FITS)]
    with pytest.raises(AdmissionError) as refused:
        scheduler.add(request("another"), 0.0)
    assert refused.value.field == "sampling.structured_output"


def test_the_queue_counts_those_whose_grammar_is_prepared():
    scheduler = joined(max_waiting_tokens=5)
    scheduler.add(request("a"), 0.0)
    with pytest.raises(AdmissionError, match="3 prompt tokens are queued, with this request 6, the limit is 5"):
        scheduler.add(request("b", None), 0.0)


def test_prompt_log_probabilities_outlive_a_swap_that_drops_the_sample_beside_them():
    """A gated row is swapped while the step is on its way that computes its prompt and samples: the sample is made
    again, but no position of the prompt is ever computed again."""
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
