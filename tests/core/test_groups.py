"""Groups of sequences: forks, beams, swaps, the host tier, sliding windows, policies, and reports of the core."""

import random
from functools import partial

import pytest

from scheduler_service.core import explain
from scheduler_service.core.cache import content_root
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    BlockRemoved,
    BlockStored,
    BlockUse,
    CacheCleared,
    EarlyStopping,
    EndReason,
    Tier,
)
from testing.seeds import seeded
from tests.core.system import System, beam_reference, prompt_of
from tests.thorough import thorough


def plans_of(system: System) -> list:
    """Run until all requests have ended, and return every plan."""
    plans = []
    make = system.scheduler.schedule

    def schedule(now):
        plan = make(now)
        if plan is not None:
            plans.append(plan)
        return plan

    system.scheduler.schedule = schedule
    system.run()
    return plans


# Forks


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
def test_samples_share_the_full_blocks_of_their_prompt_and_copy_the_partial_one(length, caching):
    system = System(enable_prefix_caching=caching, max_num_seqs=8)
    ids = system.add(prompt_of(length), 10, n=4, seed=3)
    system.join()
    plans = plans_of(system)
    openings = {opening.sequence_id: opening for plan in plans for opening in plan.openings}
    num_shared = (length - 1) // 4
    first = openings[ids[0]]
    for sequence_id in ids[1:]:
        opening = openings[sequence_id]
        assert opening.block_ids[:num_shared] == first.block_ids[:num_shared]
        assert not set(opening.block_ids[num_shared:]) & set(first.block_ids)
        assert opening.num_computed_tokens == length - 1
    assert sum(len(plan.copy_source_blocks) for plan in plans) == (3 if (length - 1) % 4 else 0)
    system.assert_exact()
    assert len({tuple(system.tokens[sequence_id]) for sequence_id in ids}) == 4
    assert [system.ended[sequence_id].num_cached_tokens for sequence_id in ids] == [0, *[length - 1] * 3]


def test_samples_open_late_where_rows_are_few_and_after_their_leader_has_gone():
    system = System(max_num_seqs=2)
    system.add(prompt_of(9), 12, n=5, seed=1)
    system.add(prompt_of(9, 1), 12, n=2, seed=1)
    system.join()
    system.run()
    system.assert_exact()


# Beams


@pytest.mark.parametrize("early", EarlyStopping)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_beams_are_those_of_an_undisturbed_search(depth, width, early):
    system = System(depth=depth, num_blocks=100)
    ids = system.add_beams(prompt_of(13), 12, width=width, n=width, stop=range(0, 97, 30), early=early)
    (beside,) = system.add(prompt_of(7), 12)
    system.join()
    system.run()
    found = beam_reference(system.sequences[ids[0]][0])
    assert [system.tokens[i] for i in ids] == [list(hypothesis.token_ids) for hypothesis in found]
    assert [system.hypotheses[i].cumulative_logprob for i in ids] == [h.cumulative_logprob for h in found]
    assert [system.ended[i].stop_token_id for i in ids] == [hypothesis.stop_token_id for hypothesis in found]
    assert system.tokens[beside] == system.expected(beside)


def test_no_group_waits_for_a_search():
    """At pipeline depth 2, a beam search runs in every second plan, and a row beside it gets a token in each plan."""
    system = System(num_blocks=100)
    (beside,) = system.add(prompt_of(7), 12)
    system.add_beams(prompt_of(13), 12, width=4)
    system.join()
    for _ in range(3):
        system.plan()
    for _ in range(8):
        before = len(system.tokens[beside])
        system.complete()
        assert len(system.tokens[beside]) == before + 1
        system.plan()
    system.run()


def test_a_beam_step_costs_forks_and_copies_of_tails_only():
    system = System(num_blocks=100, block_size=4)
    system.add_beams(prompt_of(40), 20, width=4)
    system.join()
    plans = plans_of(system)
    assert [len(plan.openings) for plan in plans] == [1] + [0] * (len(plans) - 1)
    assert all(len(plan.copy_source_blocks) <= 3 and len(plan.append_token_slots) <= 4 for plan in plans)
    assert any(plan.fork_source_slots for plan in plans)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_searches_are_preempted_whole_and_lose_nothing(mode):
    system = System(num_blocks=24, num_host_blocks=40, preemption=mode, max_num_seqs=12)
    for i in range(4):
        system.add(prompt_of(6, i), 30, priority=-1)
        system.add_beams(prompt_of(9, i), 10, width=3, n=3)
    system.join()
    system.run()
    assert explain.stats(system.scheduler.state).num_preemptions > 0
    assert (explain.stats(system.scheduler.state).num_swap_preemptions > 0) == (mode is PreemptionMode.SWAP)
    for sequence_id, tokens in system.tokens.items():
        assert tokens == system.expected(sequence_id)


# Swaps


@pytest.mark.parametrize("delays_moves", [False, True])
def test_swapped_requests_go_on_where_they_were(delays_moves):
    system = System(num_blocks=14, num_host_blocks=60, preemption=PreemptionMode.SWAP, delays_moves=delays_moves)
    for i in range(6):
        system.add(prompt_of(9, i), 24, n=1 + i % 2)
    system.join()
    plans = plans_of(system)
    stats = explain.stats(system.scheduler.state)
    assert stats.num_swap_preemptions == stats.num_preemptions > 0
    assert stats.num_moved_blocks_out > 0
    assert stats.num_moved_blocks_in > 0
    resumed = [opening for plan in plans for opening in plan.openings if len(opening.token_ids) > 9]
    assert all(opening.num_computed_tokens == len(opening.token_ids) - 1 for opening in resumed)
    system.assert_exact()


def test_a_shared_block_is_swapped_once():
    system = System(num_blocks=16, num_host_blocks=60, preemption=PreemptionMode.SWAP, enable_prefix_caching=False)
    system.add(prompt_of(8, 1), 30, priority=-1)
    system.add(prompt_of(33), 12, n=2, seed=4)
    system.join()
    plans = plans_of(system)
    for plan in plans:
        assert len(set(plan.swap_out_device_blocks)) == len(plan.swap_out_device_blocks)
        assert len(set(plan.swap_in_host_blocks)) == len(plan.swap_in_host_blocks)
    assert any(plan.swap_out_device_blocks for plan in plans)
    system.assert_exact()


def test_without_room_on_the_host_victims_are_computed_again():
    system = System(num_blocks=12, num_host_blocks=1, preemption=PreemptionMode.SWAP)
    for i in range(5):
        system.add(prompt_of(9, i), 20)
    system.join()
    system.run()
    assert (
        explain.stats(system.scheduler.state).num_preemptions
        > explain.stats(system.scheduler.state).num_swap_preemptions
    )
    system.assert_exact()


def test_swapped_requests_are_recomputed_after_worker_loss():
    system = System(num_blocks=14, num_host_blocks=60, preemption=PreemptionMode.SWAP)
    for i in range(6):
        system.add(prompt_of(9, i), 24)
    system.join()
    for _ in range(100):
        system.plan()
        system.complete()
        if explain.stats(system.scheduler.state).num_swapped:
            break
    assert explain.stats(system.scheduler.state).num_swapped > 0
    system.lose()
    system.scheduler.check()
    assert explain.stats(system.scheduler.state).num_swapped == 0
    system.join()
    system.run()
    system.assert_exact()


# The host tier


def test_a_prefix_that_was_evicted_to_the_host_is_loaded_and_not_computed():
    system = System(num_blocks=32, num_host_blocks=64, max_num_seqs=4)
    shared = prompt_of(60)
    system.join()
    system.add([*shared, 1], 4)
    system.run()
    for i in range(5):  # other requests evict it
        system.add(prompt_of(40, i + 1), 4)
        system.run()
    chain = system.scheduler.state.worker.cache.index.match(content_root("", "", b"m"), shared, 15)
    assert chain
    assert not all(node.contents[0].blocks for node in chain), "it is on the device still: the test tests nothing"
    before = explain.stats(system.scheduler.state)
    ids = [system.add([*shared, 2 + i], 4)[0] for i in range(4)]
    system.run()
    after = explain.stats(system.scheduler.state)
    assert after.num_cached_prompt_tokens - before.num_cached_prompt_tokens == 4 * 60
    assert after.num_host_cached_prompt_tokens > before.num_host_cached_prompt_tokens
    assert after.num_moved_blocks_in - before.num_moved_blocks_in <= 15
    assert [system.tokens[i] for i in ids] == [system.expected(i) for i in ids]


def test_prompts_of_a_single_step_do_not_outrun_demotion():
    """Each of these prompts allocates many blocks in its only plan."""
    system = System(num_blocks=200, num_host_blocks=1000, budget=400)
    shared = prompt_of(200)
    system.join()
    system.add([*shared, 1], 1)
    system.run()
    for i in range(10):
        system.add(prompt_of(240, i + 1), 1)
        system.run()
    before = explain.stats(system.scheduler.state)
    system.add([*shared, 2], 1)
    system.run()
    after = explain.stats(system.scheduler.state)
    assert after.num_host_cached_prompt_tokens - before.num_host_cached_prompt_tokens == 200
    system.assert_exact()


def test_content_that_is_not_cheaper_to_load_is_computed():
    system = System(num_blocks=32, num_host_blocks=64, max_num_seqs=4)
    system.join()
    system.scheduler.state.worker.cost._swap_bandwidth = 1e-9
    system.scheduler.state.worker.cost.prefill_rate = 1e9
    system.add([*prompt_of(60), 1], 4)
    system.run()
    for i in range(6):
        system.add(prompt_of(40, i + 1), 4)
    system.run()
    system.add([*prompt_of(60), 2], 4)
    system.run()
    assert explain.stats(system.scheduler.state).num_host_cached_prompt_tokens == 0
    system.assert_exact()


# Windows


def test_blocks_that_fell_out_of_the_window_are_freed():
    system = System(num_blocks=40, windows=(8,), budget=16)
    (sequence_id,) = system.add(prompt_of(100), 50)
    system.join()
    most = 0
    while system.scheduler.has_requests:
        while system.plan():
            system.scheduler.check()
        system.complete()
        if len(system.tokens[sequence_id]) > 1:
            most = max(most, explain.stats(system.scheduler.state).num_held_blocks)
    assert 0 < most <= 5  # the window, a block at each end, and the blocks of tokens in flight
    assert system.tokens[sequence_id] == system.expected(sequence_id)


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"width": 2}], ids=["alone", "samples", "beams"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_a_request_longer_than_the_pool_runs_in_the_blocks_of_its_windows(block_size, caching, options):
    """A request runs in the minimum number of blocks, and is refused if the pool has one block less."""
    num_window_blocks = (8 + block_size - 2) // block_size + 1
    num_rows = options.get("n", options.get("width", 1))
    num_blocks = num_rows * num_window_blocks + options.get("width", 0)
    system = System(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=(8,),
        budget=64,
        enable_prefix_caching=caching,
        watermark=0.5,
    )
    add = system.add_beams if "width" in options else system.add
    system.join()
    add(prompt_of(150), 90, **options)
    system.run()
    system.assert_exact()
    smaller = System(num_blocks=num_blocks - 1, block_size=block_size, windows=(8,))
    smaller.join()
    add = smaller.add_beams if "width" in options else smaller.add
    with pytest.raises(AdmissionError, match=f"has {num_blocks - 1}"):
        add(prompt_of(150), 90, **options)


def test_chunks_use_free_blocks_and_preempt_no_group():
    """Two prompts longer than the pool share it chunk by chunk, beside a row that decodes."""
    system = System(num_blocks=16, windows=(8,), budget=64, watermark=0.0)
    system.join()
    system.add(prompt_of(3), 60)
    system.plan()
    for i in range(2):
        system.add(prompt_of(200, i), 20)
    system.run()
    assert explain.stats(system.scheduler.state).num_preemptions == 0
    system.assert_exact()


@pytest.mark.parametrize("preemption", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_requests_longer_than_the_pool_are_preempted_and_go_on(preemption):
    system = System(num_blocks=9, num_host_blocks=20, windows=(8,), budget=16, preemption=preemption)
    system.join()
    for i in range(4):
        system.add(prompt_of(2, i), 120)
    system.add(prompt_of(100, 5), 30, priority=-1)
    system.run()
    assert explain.stats(system.scheduler.state).num_preemptions > 0
    system.assert_exact()


@pytest.mark.parametrize(("num_blocks", "n"), [(4, 2), (5, 3)])
def test_rows_of_which_a_swap_keeps_nothing_are_computed_again(num_blocks, n):
    """A window of one position reads nothing before a block that a row has just begun."""
    system = System(
        num_blocks=num_blocks, block_size=2, num_host_blocks=8, windows=(1,), budget=16, preemption=PreemptionMode.SWAP
    )
    system.join()
    for i in range(2):
        system.add(prompt_of(5, i), 12, n=n)
    system.add(prompt_of(5, 9), 12, priority=-1)
    system.run()
    assert explain.stats(system.scheduler.state).num_swap_preemptions > 0
    system.assert_exact()


def test_a_matched_prefix_holds_only_what_the_window_reads():
    system = System(num_blocks=64, windows=(8,), budget=256)
    system.join()
    system.add(prompt_of(161), 1)
    system.run()
    system.add([*prompt_of(160), 5, 6, 7], 4)
    (opening,) = system.plan().openings
    assert opening.num_computed_tokens == 160
    assert opening.block_ids[:38] == (0,) * 38
    assert 0 not in opening.block_ids[38:]
    system.run()
    system.assert_exact()


def test_only_what_the_window_reads_is_loaded_from_the_host():
    system = System(num_blocks=12, num_host_blocks=64, windows=(8,), budget=16)
    system.join()
    system.add(prompt_of(81), 1)
    system.run()
    for i in range(3):  # they leave no block of it on the device
        system.add(prompt_of(81, i + 1), 1)
        system.run()
    system.add([*prompt_of(80), 5, 6, 7], 4)
    plan = system.plan()
    assert 0 < len(plan.swap_in_host_blocks) <= 2
    system.run()
    system.assert_exact()


@pytest.mark.parametrize("mode", PreemptionMode)
def test_all_kinds_of_requests_longer_than_the_pool_share_it(mode):
    """The requests run alone, side by side, as samples and as beams.

    Their prompts and outputs do not fit the 40 positions of the pool.
    """
    system = System(num_blocks=10, num_host_blocks=20, windows=(8,), budget=16, preemption=mode)
    system.add(prompt_of(10), 200)
    system.join()
    system.run()
    system.add(prompt_of(150), 100)
    system.add(prompt_of(90), 30, n=2)
    system.add(prompt_of(12), 60, priority=-1)
    system.add_beams(prompt_of(70), 20, width=2)
    for _ in range(40):
        system.plan()
        system.complete()
        system.scheduler.check()
    system.lose()
    system.join()
    system.run()
    assert set(system.ends.values()) == {EndReason.LENGTH}
    system.assert_exact()


# Layer groups


def draw_requests(rng: random.Random) -> list:
    """Return functions that add a few requests of different kinds to a system."""
    adders = []
    for _ in range(rng.choice((1, 2, 4))):
        prompt, max_tokens = prompt_of(rng.randint(1, 60), rng.randint(0, 1)), rng.randint(1, 50)
        options = rng.choice(({}, {"n": rng.randint(2, 4)}, {"width": rng.randint(2, 4)}))
        priority = rng.choice((0, 0, -1, 1))
        add = System.add_beams if "width" in options else System.add
        adders.append(partial(add, prompt=prompt, max_tokens=max_tokens, priority=priority, **options))
    return adders


@pytest.mark.parametrize("seed", [51, 152, 275, *thorough(*range(50))])
def test_what_is_admitted_ends_in_the_least_pool_that_admits_it(seed):
    """Requests of all kinds share the blocks that the largest of them may need alone. It is refused with one less."""
    rng = seeded(seed)
    windows = rng.choice([(0, 20), (0, 7), (0, 0, 9), (0, 12, 5), (16, 3), (9,)])
    options = {
        "windows": windows,
        "block_size": rng.choice((1, 2, 4, 8)),
        "budget": rng.choice((8, 64)),
        "depth": rng.choice((1, 2)),
        "max_num_seqs": rng.choice((4, 8)),
        "enable_prefix_caching": rng.random() < 0.5,
        "watermark": rng.choice((0.0, 0.5)),
        "num_host_blocks": rng.choice((0, 20, 200)),
        "preemption": rng.choice(tuple(PreemptionMode)),
        "delays_moves": rng.random() < 0.3,
        "policy": rng.choice(("priority", "agent")),
    }
    adders, ample = draw_requests(rng), System(num_blocks=10_000, **options)
    ample.join()
    sizes = []
    for add in adders:
        add(ample)
        *_, group = ample.scheduler.state.groups.values()
        sizes.append(ample.scheduler.state.worker.cache.room.max_request_blocks(group.request))
    tight, smaller = System(num_blocks=max(sizes), **options), System(num_blocks=max(sizes) - 1, **options)
    tight.join()
    for add in adders:
        add(tight)
        for _ in range(rng.choice((0, 1, 10))):
            tight.plan()
            if tight.results:
                tight.complete()
    tight.run()
    tight.assert_exact()
    smaller.join()
    with pytest.raises(AdmissionError):
        adders[sizes.index(max(sizes))](smaller)


# Admission


@pytest.mark.parametrize(("length", "num_blocks"), [(8, 21), (9, 18)])  # one full block is shared, or two
def test_a_group_that_can_never_fit_is_refused(length, num_blocks):
    system = System(num_blocks=10)
    system.join()
    with pytest.raises(AdmissionError, match=f"with n 4 the request may need {num_blocks} blocks") as error:
        system.add(prompt_of(length), 16, n=4)
    assert (error.value.reason, error.value.field) == (AdmissionReason.INVALID, "sampling.n")
    with pytest.raises(AdmissionError, match="beam_width is 9, but this server runs at most 8") as error:
        system.add_beams(prompt_of(9), 2, width=9)
    assert error.value.field == "sampling.beam_width"
    system.add(prompt_of(9), 16)
    system.run()


def test_a_tenant_may_queue_no_more_than_its_share():
    system = System(max_tenant_waiting_requests=2)
    system.add([1], 2, tenant="a")
    system.add([1], 2, tenant="a")
    with pytest.raises(AdmissionError, match="2 sequences of this tenant are queued, the limit is 2"):
        system.add([1], 2, tenant="a")
    system.add([1], 2, tenant="b")
    system.join()
    system.run()


def test_a_flood_by_one_tenant_does_not_starve_another():
    ends = {}
    for name in ("fcfs", "fair"):
        system = System(max_num_seqs=2, policy=name)
        for i in range(30):
            system.add(prompt_of(8, i), 8, tenant="flood")
        (small,) = system.add(prompt_of(8, 99), 8, tenant="small")
        system.join()
        system.run()
        ends[name] = list(system.ends).index(small)
    assert ends["fcfs"] == 30
    assert ends["fair"] <= 4


def test_the_deadline_policy_serves_the_most_urgent_first():
    system = System(max_num_seqs=1, policy="deadline")
    ids = [system.add([i + 1], 3, deadline=deadline)[0] for i, deadline in enumerate([None, 9.0, 3.0])]
    system.join()
    system.run()
    assert list(system.ends) == [ids[2], ids[1], ids[0]]


# Reports


def test_a_report_says_why_a_request_waits():
    system = System(num_blocks=10, max_num_seqs=3)
    system.add(prompt_of(25), 10, request_id="big", tenant="")
    system.join()
    system.plan()
    system.add(prompt_of(20, 1), 8, request_id="next")
    system.add(prompt_of(20, 2), 8, request_id="last", tenant="")
    running = explain.report(system.scheduler.state, "", "big")
    assert (running.state, running.reason, running.queue_position) == ("running", "", None)
    waiting = explain.report(system.scheduler.state, "", "next")
    assert (waiting.state, waiting.queue_position) == ("waiting", 1)
    assert waiting.reason == "it waits for 5 blocks, 3 are free"
    assert (waiting.num_wanted_blocks, waiting.num_free_blocks) == (5, 3)
    assert [(holder.request_id, holder.num_blocks) for holder in waiting.holders] == [("big", 7)]
    assert explain.report(system.scheduler.state, "", "last").reason == "it waits behind 1 other requests"
    with pytest.raises(KeyError):
        explain.report(system.scheduler.state, "other", "big")
    system.run()


def test_the_map_tells_the_owners_of_blocks():
    system = System(num_blocks=12)
    system.join()
    system.add(prompt_of(9), 4, request_id="a")
    system.run()
    system.add(prompt_of(9), 4, request_id="b", seed=1)
    system.add([*prompt_of(8), 1], 4, request_id="c")
    system.plan()
    blocks = explain.block_map(system.scheduler.state)
    uses = [BlockUse(min(use, BlockUse.HELD)) for use in blocks.device]
    assert blocks.owners == ("b", "c")
    assert uses.count(BlockUse.SHARED) == 2
    assert uses.count(BlockUse.HELD) == 2
    assert len(blocks.device) == 12
    system.run()
    assert BlockUse.CACHED in explain.block_map(system.scheduler.state).device


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_kv_events_tell_what_can_be_matched(windows):
    """A block is reported where all layer groups have it."""
    system = System(num_blocks=8 * len(windows), num_host_blocks=8 * len(windows), windows=windows)
    system.join()
    system.add(prompt_of(8), 6)
    system.run()
    stored = [event for event in system.scheduler.take_kv_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored[:2]] == [tuple(prompt_of(8)[:4]), tuple(prompt_of(8)[4:])]
    assert stored[1].parent_hash == stored[0].block_hash
    assert stored == system.scheduler.kv_snapshot()
    assert system.scheduler.take_kv_events() == []
    for i in range(4):
        system.add(prompt_of(20, i + 1), 4)
        system.run()
    known = {(event.block_hash, event.tier) for event in stored}
    for event in system.scheduler.take_kv_events():
        if isinstance(event, BlockStored):
            known.add((event.block_hash, event.tier))
        elif isinstance(event, BlockRemoved):
            known.remove((event.block_hash, event.tier))
    assert known == {(event.block_hash, event.tier) for event in system.scheduler.kv_snapshot()}
    assert {tier for _, tier in known} == {Tier.DEVICE, Tier.HOST}
    system.lose()
    assert system.scheduler.take_kv_events() == [CacheCleared()]


def test_kv_events_say_whose_block_it_is_and_where_a_prefix_begins():
    system = System(num_blocks=8)
    system.join()
    system.add(prompt_of(8), 1, tenant="red", cache_salt="salt")
    system.run()
    first, second = system.scheduler.kv_snapshot()
    assert (first.is_first, second.is_first) == (True, False)
    root = content_root("red", "salt", b"m").digest
    assert {event.root for event in (first, second)} == {root}
    assert root not in {content_root("red", "", b"m").digest, content_root("", "salt", b"m").digest}
    system.scheduler.take_kv_events()
    system.scheduler.flush_cache(system.now)
    removed = system.scheduler.take_kv_events()
    assert {(event.block_hash, event.root) for event in removed} == {
        (event.block_hash, root) for event in (first, second)
    }


def test_a_flush_forgets_both_tiers_once_nothing_runs():
    system = System(num_blocks=8, num_host_blocks=8)
    system.join()
    for i in range(3):
        system.add(prompt_of(12, i), 1)
        system.run()
    assert {event.tier for event in system.scheduler.kv_snapshot()} == {Tier.DEVICE, Tier.HOST}
    system.add(prompt_of(12), 4)
    system.scheduler.flush_cache(system.now)
    assert system.scheduler.kv_snapshot(), "a request was there"
    system.run()
    system.scheduler.flush_cache(system.now)
    system.scheduler.check()
    stats = explain.stats(system.scheduler.state)
    assert (stats.num_cached_blocks, stats.num_cached_host_blocks, system.scheduler.kv_snapshot()) == (0, 0, [])
    num_cached_tokens = stats.num_cached_prompt_tokens
    system.add(prompt_of(12), 1)
    system.run()
    assert explain.stats(system.scheduler.state).num_cached_prompt_tokens == num_cached_tokens
