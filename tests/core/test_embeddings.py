"""Embedding requests, which end with the result of their prompt.

No token is generated, and interruptions do not change the embedding.
"""

import random
from dataclasses import replace

import pytest

from pagewire.common.wire.messages import Pooling, WorkerProtocolError
from scheduler_service.core import explain
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.request import AdmissionError, EndReason
from testing.core.simulated_worker import reference_embedding
from tests.core.system import VOCAB, System, prompt_of

POOLINGS = [Pooling.LAST, Pooling.MEAN]
poolings = pytest.mark.parametrize("pooling", POOLINGS)


def add(system: System, prompt: list[int], pooling: Pooling, **fields) -> int:
    (sequence_id,) = system.add(prompt, 0, sampling={"pooling": pooling}, **fields)
    return sequence_id


def assert_embedded(system: System, sequence_id: int) -> None:
    request, _ = system.sequences[sequence_id]
    end = system.ended[sequence_id]
    assert end.reason is EndReason.STOP
    assert (end.num_prompt_tokens, end.num_output_tokens) == (len(request.prompt_token_ids), 0)
    assert end.embedding == reference_embedding(request.prompt_token_ids, request.sampling.pooling)


@poolings
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("length", "budget"), [(1, 64), (4, 64), (30, 64), (30, 7), (9, 1)])
def test_embedding_does_not_depend_on_prompt_chunks(pooling, depth, length, budget):
    system = System(depth=depth, budget=budget)
    beside = system.add(prompt_of(9, 1), 12)[0]
    sequence_id = add(system, prompt_of(length), pooling)
    system.join()
    system.run()
    assert_embedded(system, sequence_id)
    assert system.tokens[beside] == system.expected(beside)
    stats = explain.stats(system.scheduler.state)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (length + 9, 12)


@poolings
def test_nothing_is_computed_beyond_the_prompt(pooling):
    system = System(budget=8)
    add(system, prompt_of(20), pooling)
    system.join()
    system.run()
    assert system.num_plans == 3


def test_the_prefix_cache_serves_the_last_token_and_no_mean():
    system = System()
    system.join()
    for pooling in POOLINGS:
        ids = [add(system, prompt_of(17), pooling, cache_salt=pooling.name)]
        system.run()
        ids.append(add(system, prompt_of(17), pooling, cache_salt=pooling.name))
        system.run()
        for sequence_id in ids:
            assert_embedded(system, sequence_id)
        cached = [system.ended[sequence_id].num_cached_tokens for sequence_id in ids]
        assert cached == ([0, 16] if pooling is Pooling.LAST else [0, 0])


def test_blocks_of_an_embedding_are_reused():
    system = System()
    system.join()
    for pooling in POOLINGS:
        add(system, prompt_of(17), pooling, cache_salt=pooling.name)
        system.run()
        (other,) = system.add(prompt_of(17), 4, cache_salt=pooling.name)
        system.run()
        assert system.ended[other].num_cached_tokens == 16
        assert system.tokens[other] == system.expected(other)


@poolings
@pytest.mark.parametrize("limits", [{}, {"max_decode_slowdown": 1.0, "policy": "agent"}])
def test_prompts_of_a_bidirectional_model_are_computed_whole_and_never_cached(pooling, limits):
    system = System(budget=20, num_blocks=12, **limits)
    system.capacity = replace(system.capacity, is_bidirectional=True)
    early = add(system, prompt_of(21, 1), pooling)
    system.join()
    assert system.ends.pop(early) is EndReason.NO_LONGER_FITS
    assert "in one step, of --max-num-batched-tokens 20" in system.ended[early].message
    rng = random.Random(3)
    ids = [add(system, prompt_of(rng.choice([1, 12, 19, 20])), pooling) for _ in range(30)]
    lengths = {}
    while len(system.ends) < len(ids):
        plan = system.plan()
        for opening in () if plan is None else plan.openings:
            assert opening.num_computed_tokens == 0
            lengths[opening.slot] = len(opening.token_ids)
        for slot, num_tokens in () if plan is None else zip(plan.work_slots, plan.work_num_tokens, strict=True):
            assert num_tokens in (0, lengths[slot])
        if plan is None:
            system.complete()
        system.scheduler.check()
    for sequence_id in ids:
        assert_embedded(system, sequence_id)
        assert system.ended[sequence_id].num_cached_tokens == 0
    with pytest.raises(AdmissionError, match=r"this server allows 21 \(this model computes a prompt in one step, of"):
        add(system, prompt_of(21), pooling)


@poolings
@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
@pytest.mark.parametrize("delays_moves", [False, True])
def test_preempted_embeddings_are_those_of_an_undisturbed_run(pooling, mode, delays_moves):
    system = System(
        num_blocks=14, budget=6, num_host_blocks=30, preemption=mode, delays_moves=delays_moves, max_num_seqs=6
    )
    for i in range(3):
        system.add(prompt_of(3, i), 14, priority=-1)
    ids = [add(system, prompt_of(21, 10 + i), pooling) for i in range(3)]
    system.join()
    system.run()
    for sequence_id in ids:
        assert_embedded(system, sequence_id)
    assert any(system.ended[sequence_id].pauses for sequence_id in ids), "no embedding was preempted"
    stats = explain.stats(system.scheduler.state)
    # The KV cache of a mean embedding is not kept, because no other row could continue from it.
    assert (stats.num_swap_preemptions > 0) == (mode is PreemptionMode.SWAP and pooling is Pooling.LAST)
    system.assert_exact()


@poolings
@pytest.mark.parametrize("num_plans", [1, 2, 3, 4])
def test_a_lost_worker_costs_an_embedding_nothing_but_time(pooling, num_plans):
    system = System(budget=6)
    ids = [add(system, prompt_of(16, i), pooling) for i in range(2)]
    system.join()
    for _ in range(num_plans):
        if system.plan() is None:
            system.complete()
            system.plan()
    system.lose()
    system.scheduler.check()
    system.join()
    system.run()
    for sequence_id in ids:
        assert_embedded(system, sequence_id)


@poolings
def test_an_aborted_embedding_ends_without_one(pooling):
    system = System(budget=6)
    sequence_id = add(system, prompt_of(16), pooling)
    system.join()
    system.plan()
    request, _ = system.sequences[sequence_id]
    system.take(system.scheduler.abort("", request.request_id, system.now))
    system.run()
    assert (system.ends[sequence_id], system.ended[sequence_id].embedding) == (EndReason.ABORT, b"")


@poolings
def test_a_prompt_may_fill_the_whole_pool(pooling):
    system = System(num_blocks=5)
    system.join()
    sequence_id = add(system, prompt_of(20), pooling)
    system.run()
    assert_embedded(system, sequence_id)
    with pytest.raises(AdmissionError, match="together"):
        add(system, prompt_of(22), pooling)


@poolings
def test_hidden_states_that_are_no_numbers_fail_their_request_alone(pooling):
    system = System(poisoned=[VOCAB - 1], budget=8)
    poison = add(system, [*prompt_of(9), VOCAB - 1, 3], pooling)
    good = add(system, prompt_of(11, 2), pooling)
    system.join()
    system.run()
    assert (system.ends[poison], system.ended[poison].embedding) == (EndReason.NAN_LOGITS, b"")
    assert_embedded(system, good)


@pytest.mark.parametrize("embeddings", [(), (b"1234", b"1234"), (b"",), (b"12345",)])
def test_a_result_without_the_embedding_that_was_planned_breaks_the_protocol(embeddings):
    system = System()
    add(system, prompt_of(5), Pooling.LAST)
    system.join()
    system.plan()
    result = replace(system.results.popleft(), embeddings=embeddings)
    with pytest.raises(WorkerProtocolError, match="must yield 1 embeddings"):
        system.scheduler.complete(result, system.now)
