"""The policy `agent`: ordering by remaining computation, yielding to short prompts, and retention of sessions."""

import gc

import pytest

from scheduler_service.core import explain, retention
from scheduler_service.core.cache import content_root
from scheduler_service.core.request import EndReason
from scheduler_service.core.retention import LearnedReturnEstimate, ReturnEstimate
from scheduler_service.core.sequence import SequenceGroup, Session
from testing.seeds import seeded
from tests.core.system import VOCAB, System, prompt_of
from tests.thorough import thorough


def agent(max_wait_s: float = 600.0, **settings) -> System:
    return System(policy="agent", max_wait=max_wait_s, **settings)


def ended(system: System) -> list[str]:
    """Return the names of the requests that have ended, in order."""
    return [system.sequences[sequence_id][0].request_id for sequence_id in system.ends]


def run_one(system: System, prompt: list[int], max_tokens: int = 4, **fields) -> list[int]:
    """Run one request until it ends; return its prompt and output tokens."""
    (sequence_id,) = system.add(prompt, max_tokens, **fields)
    system.run()
    return prompt + system.tokens[sequence_id]


# Order


def test_request_with_most_cached_prompt_goes_first():
    system = agent(max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(120), request_id="first")
    for name, prompt in (("new", prompt_of(60, 1)), ("short", prompt_of(20, 2)), ("back", [*history, 1, 2])):
        system.add(prompt, 2, request_id=name)
    assert explain.report(system.scheduler.state, "", "back").queue_position == 1
    system.run()
    assert ended(system) == ["first", "back", "new", "short"], "of those that find nothing, who came first"
    system.assert_exact()


def test_waiting_requests_are_reordered_as_prefixes_are_computed():
    """Two requests wait for the only row.

    The running request shares the prompt of one of them, which therefore becomes cheap.
    """
    system = agent(max_num_seqs=1, budget=16)
    system.join()
    shared = prompt_of(80)
    system.add(shared, 8, request_id="runs")
    system.plan()
    system.add(prompt_of(40, 1), 2, request_id="short")
    system.now = 100.0
    system.add([*shared, 3], 2, request_id="alike")
    assert explain.report(system.scheduler.state, "", "short").queue_position == 1
    system.run()
    assert ended(system) == ["runs", "alike", "short"]


def test_groups_that_waited_too_long_go_first_in_order_of_arrival():
    system = agent(max_wait_s=10.0, max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(120), request_id="first")
    system.add(prompt_of(8, 9), 30, request_id="runs")
    system.plan()
    system.add(prompt_of(100, 1), 2, request_id="long")
    system.add(prompt_of(60, 2), 2, request_id="middle")
    system.now = 9.0
    system.add([*history, 3], 2, request_id="back")
    assert explain.report(system.scheduler.state, "", "back").queue_position == 1
    system.now = 10.0
    system.run()
    assert ended(system) == ["first", "runs", "long", "middle", "back"]
    stats = explain.stats(system.scheduler.state)
    assert (stats.num_admitted_requests, stats.num_overdue_requests) == (5, 2)


def test_priority_takes_precedence_over_cost():
    system = agent(max_num_seqs=1)
    system.add(prompt_of(4, 1), 2, request_id="late", priority=1)
    system.add(prompt_of(100, 2), 2, request_id="urgent", priority=0)
    system.join()
    system.run()
    assert ended(system) == ["urgent", "late"]


def test_the_bound_on_waiting_holds_within_a_priority():
    """A later request with a better priority goes before an overdue one, as the help of --max-wait says."""
    system = agent(max_wait_s=10.0, max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(120), request_id="first")
    system.add(prompt_of(8, 9), 30, request_id="runs")
    system.plan()
    system.add(prompt_of(100, 1), 2, request_id="overdue", priority=1)
    system.now = 11.0
    system.add([*history, 3], 2, request_id="cached", priority=1)
    system.add(prompt_of(60, 2), 2, request_id="urgent", priority=0)
    system.run()
    assert ended(system) == ["first", "runs", "urgent", "overdue", "cached"]


def test_tenant_share_takes_precedence_over_cost():
    system = agent(max_num_seqs=1)
    for i in range(6):
        system.add(prompt_of(8, i), 2, request_id=f"small {i}", tenant="small")
        system.add(prompt_of(80, 10 + i), 2, request_id=f"large {i}", tenant="large")
    system.join()
    system.run()
    order = [name.split()[0] for name in ended(system)]
    assert order[:2] in (["small", "large"], ["large", "small"])
    assert order[6:].count("large") >= 4  # the requests of `large` cost ten times as much


def test_waiting_requests_are_ordered_anew_by_another_workers_cache():
    system = agent(max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(120), request_id="first")
    system.add(prompt_of(60, 1), 2, request_id="new")
    system.add([*history, 1], 2, request_id="back")
    state = system.scheduler.state
    assert explain.report(state, "", "back").queue_position == 1
    system.lose()
    system.join()
    assert explain.report(state, "", "back").queue_position == 2
    system.run()
    system.assert_exact()


def test_a_lost_worker_leaves_nothing_of_those_that_waited():
    system = agent(max_num_seqs=1)
    system.join()
    system.add(prompt_of(40), 2, request_id="runs")
    (sequence_id,) = system.add(prompt_of(40), 2, request_id="waits")
    system.plan()
    assert system.scheduler.state.groups["", "waits"].cursor is not None
    system.lose()
    system.take(system.scheduler.abort("", "waits", system.now))
    request, _ = system.sequences[sequence_id]
    assert not any(type(each) is SequenceGroup and each.request is request for each in gc.get_objects())


def test_a_report_says_what_a_request_would_compute():
    system = agent(max_wait_s=10.0, max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(40), request_id="first")
    system.add(prompt_of(4, 5), 9, request_id="runs")
    system.plan()
    system.add([*history, 1, 2], 2, request_id="back")
    num_cached = (len(history) - 1) // 4 * 4
    said = f"it would compute {len(history) + 2 - num_cached} of its {len(history) + 2} prompt tokens"
    assert explain.report(system.scheduler.state, "", "back").reason.endswith(said)
    system.now = 10.0
    system.plan()
    assert "it has waited longer than the limit" in explain.report(system.scheduler.state, "", "back").reason
    system.run()


# Long prompts yield to short prompts


def first_tokens(system: System, names: list[str], max_plans: int = 60) -> list[str]:
    """Run plan by plan; return the names in the order of their first tokens."""
    came: list[str] = []
    for _ in range(max_plans):
        system.plan()
        if not system.results:
            break
        system.complete()
        for sequence_id, tokens in system.tokens.items():
            name = system.sequences[sequence_id][0].request_id
            if tokens and name in names and name not in came:
                came.append(name)
    return came


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["long", "short"]), ("agent", ["short", "long"])])
def test_a_long_prompt_gives_way_to_one_that_is_done_at_once(policy, order):
    system = System(policy=policy, budget=16, depth=1, num_blocks=100)
    system.join()
    system.add(prompt_of(200), 3, request_id="long")
    system.plan()
    table = list(system.scheduler.state.groups["", "long"].sequences[0].allocation.tables[0].blocks)
    system.complete()
    system.add(prompt_of(12, 1), 3, request_id="short")
    assert first_tokens(system, order) == order
    system.assert_exact()
    assert len(table) == 50  # all blocks of its prompt: the sequence has lost none of them
    assert explain.stats(system.scheduler.state).num_preemptions == 0


def test_prompt_longer_than_a_step_waits_for_a_long_prompt():
    system = agent(budget=16, depth=1, num_blocks=100)
    system.join()
    system.add(prompt_of(100), 3, request_id="long")
    system.plan()
    system.complete()
    system.add(prompt_of(40, 1), 3, request_id="longer than a step")
    assert first_tokens(system, ["long", "longer than a step"]) == ["long", "longer than a step"]


def slowed(tenant: str = "") -> System:
    """Return a system in which one request of `tenant` decodes, so that a step has room for 10 prompt tokens."""
    system = agent(budget=64, depth=1, num_blocks=400, max_decode_slowdown=2.0)
    system.join()
    system.add(prompt_of(150), 100, request_id="decodes", tenant=tenant)
    for _ in range(5):
        system.timed_step(0.01)
    return system


def test_prompt_that_fits_the_step_goes_first_under_slowdown_limit():
    """The long prompt computes 10 tokens in its first step.

    The short prompt has 24 tokens, which leave 6 for the long one.
    """
    system = slowed()
    (long,) = system.add(prompt_of(200, 1), 3, request_id="long")
    system.timed_step(0.01)
    (short,) = system.add(prompt_of(24, 2), 3, request_id="short")
    while not system.tokens[short]:
        assert not system.tokens[long]
        system.timed_step(0.01)
    assert system.scheduler.state.groups["", "long"].sequences[0].allocation.num_computed_tokens == 16
    system.run()
    system.assert_exact()


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("is_alike", [False, True])
def test_slowed_prompts_of_one_tenant_do_not_block_another(num_samples: int, is_alike: bool) -> None:
    """The other tenant has had less service, so its waiting prompts begin first.

    A prompt whose beginning is already being computed does not begin. The short prompt begins after these prompts, and
    is computed in three steps.
    """
    system = slowed(tenant="served")
    for index in range(3):
        prompt, name = prompt_of(200, 1 if is_alike else 1 + index), f"long {index}"
        system.add(prompt, 3, request_id=name, tenant="other", n=num_samples)
    system.timed_step(0.01)
    (short,) = system.add(prompt_of(24, 9), 3, request_id="short", tenant="served")
    for _ in range(5):
        system.timed_step(0.01)
    assert system.tokens[short]
    system.run()
    system.assert_exact()


def test_slowed_prompts_compute_a_shared_prefix_once() -> None:
    """Four prompts share 160 tokens, and each adds 8 tokens of its own."""
    system = slowed()
    for index in range(4):
        system.add([*prompt_of(160, 1), *prompt_of(8, 20 + index)], 3, request_id=f"alike {index}")
    num_prompt_tokens = 0
    while any(group.sequences[0].first_token_at is None for group in system.scheduler.state.groups.values()):
        num_prompt_tokens += system.timed_step(0.01)
    assert num_prompt_tokens == 160 + 4 * 8
    system.run()
    system.assert_exact()


def test_overdue_prompt_does_not_yield():
    system = agent(max_wait_s=10.0, budget=16, depth=1, num_blocks=100)
    system.join()
    system.add(prompt_of(200), 3, request_id="long")
    system.plan()
    system.complete()
    system.now = 10.0
    system.add(prompt_of(12, 1), 3, request_id="short")
    assert first_tokens(system, ["long", "short"]) == ["long", "short"]


def test_the_prompt_that_has_least_left_is_computed_first():
    system = agent(budget=16, depth=1, num_blocks=200)
    system.add(prompt_of(40, 1), 3, request_id="short")
    system.join()
    system.plan()
    system.add(prompt_of(12, 2), 3, request_id="tiny")
    system.complete()
    assert first_tokens(system, ["short", "tiny"]) == ["tiny", "short"]
    system.assert_exact()


# Retention


def kept(system: System, prompt: list[int], tenant: str = "") -> int:
    """Return the number of a prompt's tokens that are cached, on the device or the host."""
    index = system.scheduler.state.worker.cache.index
    return 4 * len(index.match(content_root(tenant, "", b"m"), prompt, len(prompt) // 4))


def test_what_a_waiting_request_will_use_is_evicted_last():
    system = agent(num_blocks=30, max_num_seqs=1, watermark=0.0)
    system.join()
    old = run_one(system, prompt_of(40, 1), session_id="old")
    system.now = 50.0
    young = run_one(system, prompt_of(40, 2), session_id="young")
    system.add(prompt_of(30, 3), 8, request_id="runs")
    system.plan()  # it uses the free blocks, and then blocks of the old session
    assert kept(system, young) == 40
    lost = 40 - kept(system, old)
    system.add([*old, 1], 2, session_id="old", request_id="back")
    system.add(prompt_of(60, 4), 2, request_id="other", priority=-1)
    system.run()
    assert ended(system)[-2:] == ["other", "back"]
    assert system.ended[max(system.ends)].reason is EndReason.LENGTH
    [back] = [i for i, (request, _) in system.sequences.items() if request.request_id == "back"]
    assert system.ended[back].num_cached_tokens == 40 - lost
    assert kept(system, young) < 40


@pytest.mark.parametrize(
    ("fields", "survives"),
    [({}, False), ({"will_return": True}, False), ({"retention_seconds": 60}, True)],
)
def test_a_hint_keeps_blocks_longer(fields, survives):
    system = agent(num_blocks=30, max_num_seqs=1, watermark=0.0)
    system.join()
    old = run_one(system, prompt_of(40, 1), session_id="old", **fields)
    system.now = 50.0
    run_one(system, prompt_of(40, 2), session_id="young")
    run_one(system, prompt_of(60, 3), session_id="third")
    assert (kept(system, old) == 40) == survives


def test_session_that_will_not_return_is_evicted_first():
    system = agent(num_blocks=30, max_num_seqs=1, watermark=0.0)
    system.join()
    old = run_one(system, prompt_of(40, 1), session_id="old")
    system.now = 50.0
    last = run_one(system, prompt_of(40, 2), session_id="young", will_return=False)
    run_one(system, prompt_of(60, 3), session_id="third")
    assert kept(system, old) == 40
    assert kept(system, last) < 40


def only_on_host(system: System, prompt: list[int]) -> int:
    """Return the number of cached tokens of a prompt that only the host has, and that would have to be loaded."""
    index = system.scheduler.state.worker.cache.index
    chain = index.match(content_root("", "", b"m"), prompt, len(prompt) // 4)
    return 4 * sum(not node.contents[0].blocks for node in chain)


@pytest.mark.parametrize(
    ("retention_seconds", "fields", "comes_back"),
    [
        (None, {}, False),
        (None, {"will_return": True}, False),
        (None, {"will_return": False}, True),
        (600, {}, True),
        (600, {"tenant": "other"}, False),
        (600, {"tenant": "other", "will_return": False}, True),
    ],
)
def test_a_session_that_may_return_is_loaded_where_one_is_that_will_not(retention_seconds, fields, comes_back):
    """The session is loaded although no request asks for it, because the worker is idle.

    The loaded blocks do not replace blocks that another tenant may use again.
    """
    system = agent(num_blocks=30, num_host_blocks=60, max_num_seqs=1, watermark=0.0)
    system.join()
    hints = {"will_return": True, "retention_seconds": retention_seconds}
    old = run_one(system, prompt_of(40, 1), session_id="old", **hints)
    system.now = 50.0
    run_one(system, prompt_of(60, 2), session_id="second", **fields)
    run_one(system, prompt_of(60, 3), session_id="third", **fields)
    assert kept(system, old) == 40
    assert (only_on_host(system, old) == 0) == comes_back
    num_loaded = explain.stats(system.scheduler.state).num_moved_blocks_in
    (again,) = system.add([*old, 5], 4, session_id="old")
    system.run()
    assert system.ended[again].num_cached_tokens >= 40
    assert (explain.stats(system.scheduler.state).num_moved_blocks_in == num_loaded) == comes_back
    system.assert_exact()


def test_no_preload_if_it_would_evict_unsaved_blocks():
    """If the host has no room for the device's content, a session of a higher priority stays on the host."""
    system = agent(num_blocks=30, num_host_blocks=12, max_num_seqs=1, watermark=0.0)
    system.join()
    old = run_one(system, prompt_of(40, 1), session_id="old", retention_seconds=600)
    system.now = 50.0
    young = run_one(system, prompt_of(100, 2), session_id="young")
    assert only_on_host(system, old) > 0
    assert only_on_host(system, young) == 0


def test_a_session_is_found_by_its_name_or_its_prefix():
    system = agent(num_blocks=64)
    system.join()
    history = run_one(system, prompt_of(40), request_id="first")
    state = system.scheduler.state

    def session_of(prompt: list[int], name: str, **fields) -> Session:
        system.add(prompt, 2, request_id=name, **fields)
        return state.groups["", name].session

    found = session_of([*history, 1], "goes on")
    assert session_of(prompt_of(40, 1), "another") is not found
    assert session_of([*prompt_of(8), *prompt_of(40, 2)], "begins alike") is not found
    system.run()
    named = session_of(prompt_of(20, 3), "named", session_id="s")
    assert session_of(prompt_of(20, 4), "named again", session_id="s") is named
    assert session_of(prompt_of(20, 5), "other name", session_id="t") is not named
    system.run()


def test_a_free_list_used_again_leads_to_no_other_session(monkeypatch):
    """A session is forgotten while its prefix is in use. Its free list is then reused for another tenant's session."""
    monkeypatch.setattr(retention, "_NUM_LOST", 0)
    system = agent(num_blocks=64)
    system.join()
    state = system.scheduler.state
    history = run_one(system, prompt_of(40), tenant="a")
    system.add([*history, 1], 60, request_id="holds", tenant="a", session_id="named")
    system.plan()
    system.now = 1.0
    system.add(prompt_of(8, 9), 1, request_id="other", tenant="c")
    while ("c", "other") in state.groups:  # sessions are checked for expiry when a request ends
        system.plan()
        system.complete()
    system.add(prompt_of(8, 8), 2, request_id="thief", tenant="b")
    block = state.groups["a", "holds"].sequences[0].allocation.tables[0].blocks[0]
    free_list = state.worker.cache.pool.free_list_of(block)
    assert free_list == state.groups["b", "thief"].session.free_list
    system.add([*history[:40], 2], 2, request_id="back", tenant="a")
    assert state.groups["a", "back"].session.tenant == "a"
    system.run()


def test_session_hits_are_counted_by_absence_time():
    system = agent(num_blocks=40, max_num_seqs=1, watermark=0.0)
    system.join()
    history = run_one(system, prompt_of(40), session_id="s")
    system.now = 5.0
    history = run_one(system, [*history, 1, 2], session_id="s")
    stats = explain.stats(system.scheduler.state)
    assert (stats.num_kept_session_tokens, stats.num_lost_session_tokens) == ((0, 40, 0, 0, 0), (0,) * 5)
    run_one(system, prompt_of(140, 1), session_id="other")
    system.now = 105.0
    run_one(system, [*history, 3], session_id="s")
    stats = explain.stats(system.scheduler.state)
    assert sum(stats.num_lost_session_tokens) == stats.num_lost_session_tokens[3] > 0
    assert stats.num_kept_session_tokens[3] + stats.num_lost_session_tokens[3] == 48


def test_what_a_request_never_computed_is_not_lost():
    """A request that is aborted while it waits leaves its session unchanged."""
    system = agent(max_num_seqs=1)
    system.join()
    history = run_one(system, prompt_of(40), session_id="s")
    system.add(prompt_of(8, 9), 6, request_id="runs")
    system.plan()
    system.add([*history, *prompt_of(80, 1)], 2, session_id="s", request_id="gives up")
    system.take(system.scheduler.abort("", "gives up", system.now))
    system.run()
    run_one(system, [*history, *prompt_of(80, 1)], session_id="s")
    stats = explain.stats(system.scheduler.state)
    assert (sum(stats.num_kept_session_tokens), sum(stats.num_lost_session_tokens)) == (40, 0)


def session(last_used_at: float) -> Session:
    return Session(1, "", "", last_used_at)


def test_recency_orders_by_last_use():
    assert ReturnEstimate().last_needed_at(session(7.0)) == 7.0


def test_return_time_estimate_shrinks_towards_the_mean():
    times = LearnedReturnEstimate()
    slow, quick, new = session(1000.0), session(1000.0), session(1000.0)
    assert times.last_needed_at(new) == 1000.0
    for _ in range(50):
        times.returned(slow, 100.0)
        times.returned(quick, 1.0)
    gaps = [1000.0 - times.last_needed_at(each) for each in (quick, new, slow)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(1.0, rel=2)
    assert gaps[1] == pytest.approx(10.0, rel=0.3)
    assert 50.0 < gaps[2] <= 100.0


@pytest.mark.parametrize("seed", range(6))
def test_sessions_that_share_a_small_pool_get_what_they_should(seed):
    """Random sessions run with names, hints, a host tier and lost workers.

    Every token is correct, and no request is lost.
    """
    rng = seeded(seed)
    system = agent(
        max_wait_s=rng.choice([0.0, 3.0, 600.0]), num_blocks=40, num_host_blocks=rng.choice([0, 60]), budget=24
    )
    system.join()
    histories = [prompt_of(rng.randint(1, 60), i) for i in range(8)]
    for _ in range(30):
        chosen = rng.sample(range(8), rng.randint(1, 5))
        ids = {}
        for i in chosen:
            if len(histories[i]) > 90:
                histories[i] = prompt_of(rng.randint(1, 60), rng.randrange(1000))
            hints = {"will_return": rng.choice([None, True, False]), "retention_seconds": rng.choice([None, 5])}
            [ids[i]] = system.add(
                histories[i], rng.randint(1, 9), session_id=rng.choice(["", f"s{i}"]), tenant=f"t{i % 2}", **hints
            )
        for _ in range(rng.randint(0, 6)):
            system.plan()
            if system.results:
                system.complete()
            system.scheduler.check()
            system.now += rng.random()
        if rng.random() < 0.1:
            system.lose()
            system.join()
        system.run()
        for i, sequence_id in ids.items():
            histories[i] = [*histories[i], *system.tokens[sequence_id], rng.randrange(97)]
    system.assert_exact()
    stats = explain.stats(system.scheduler.state)
    assert stats.num_admitted_requests == len(system.ends)
    assert sum(stats.num_kept_session_tokens) > 0


# Several tenants

REPEATED = prompt_of(33, 999)  # 8 blocks: a fair share of the pools below for one of four tenants
HOARDING = {
    "hints": {"will_return": True, "retention_seconds": 300},
    "returns without hints": {},
    "long retention": {"retention_seconds": 10**6},
}


def num_found(system: System, tenant: str) -> int:
    """Run the repeated prompt for a tenant, ahead of its other requests; return the number of cached tokens."""
    (sequence_id,) = system.add(REPEATED, 2, tenant=tenant, priority=-1)
    while sequence_id not in system.ends:
        system.plan()
        system.complete()
        system.scheduler.check()
    return system.ended[sequence_id].num_cached_tokens


@pytest.mark.parametrize("num_host_blocks", [0, 100])
@pytest.mark.parametrize("fields", HOARDING.values(), ids=HOARDING)
@pytest.mark.parametrize(("hoarder", "other"), [("hoarder", "other"), ("", "named"), ("named", "")])
def test_a_hoarder_leaves_what_another_tenant_repeats(hoarder, other, fields, num_host_blocks):
    system = agent(num_blocks=64, num_host_blocks=num_host_blocks, max_num_seqs=2)
    system.join()
    assert num_found(system, other) == 0
    for i in range(30):
        system.now += 5.0
        run_one(system, prompt_of(60, i), tenant=hoarder, session_id=f"session {i}", **fields)
    assert num_found(system, other) == 32
    system.assert_exact()


def test_requests_that_wait_hoard_no_more_than_others():
    """Blocks that waiting requests will use are retained only at the expense of the same tenant."""
    system = agent(num_blocks=64, max_num_seqs=1)
    system.join()
    num_found(system, "other")
    histories = [run_one(system, prompt_of(33, i), tenant="hoarder", session_id=f"s{i}") for i in range(5)]
    for i, history in enumerate(histories):
        system.add([*history, 1, 2], 20, tenant="hoarder", session_id=f"s{i}")
    for i in range(10, 20):
        run = system.add(prompt_of(80, i), 2, tenant="hoarder", priority=-2)
        while run[0] not in system.ends:
            system.plan()
            system.complete()
    assert system.scheduler.state.waiting
    assert num_found(system, "other") == 32
    system.run()
    system.assert_exact()


def test_long_unused_blocks_do_not_protect_a_tenant():
    system = agent(num_blocks=64, max_num_seqs=1)
    system.join()
    num_found(system, "was here")
    system.now = 200.0
    num_found(system, "is here")
    system.now = 301.0
    for i in range(6):
        run_one(system, prompt_of(60, i), tenant="busy")
    assert num_found(system, "is here") == 32
    assert num_found(system, "was here") == 0


@pytest.mark.parametrize("seed", range(20))
def test_hoarders_of_any_kind_leave_a_tenant_its_share(seed):
    """Up to three tenants send random requests. A fourth tenant repeats a prompt, and finds it cached every time."""
    rng = seeded(seed)
    other, *hoarders = rng.sample(["", "a", "b", "c"], rng.randint(2, 4))
    system = agent(num_blocks=64, num_host_blocks=rng.choice([0, 60]), max_num_seqs=2, watermark=0.0)
    system.join()
    num_found(system, other)
    known = [prompt_of(rng.randint(1, 40), i) for i in range(30)]
    for _ in range(8):
        for _ in range(rng.randint(1, 12)):
            hints = {"will_return": rng.choice([None, True, False]), "retention_seconds": rng.choice([None, 1, 300])}
            name = rng.choice(["", f"s{rng.randrange(40)}"])
            system.add(rng.choice(known), rng.randint(1, 8), tenant=rng.choice(hoarders), session_id=name, **hints)
            if rng.random() < 0.5:
                system.plan()
            if system.results and rng.random() < 0.5:
                system.complete()
            system.scheduler.check()
        if rng.random() < 0.5:
            system.run()
        system.now += rng.uniform(0.0, 290.0)
        assert kept(system, REPEATED, other) == 32
        num_found(system, other)
    system.run()
    system.assert_exact()


def test_other_policies_use_no_cursors():
    system = System()
    system.join()
    system.add(prompt_of(20), 2)
    assert system.scheduler.state.worker.cache.index.cursors.number == 0
    system.run()


def num_computed_in_turn(windows: tuple[int, ...], share: float) -> int:
    """Return how many prompt tokens are computed by conversations in turn, in a share of the blocks that they need."""
    rng, num_turns = seeded(5), 4
    conversations = [prompt_of(40) for _ in range(6)]
    num_tokens = len(conversations) * (40 + num_turns * 32)
    system = System(num_blocks=int(len(windows) * share * num_tokens / 4), windows=windows, policy="agent")
    system.join()
    for _ in range(num_turns):
        for conversation in conversations:
            conversation.extend(rng.randrange(VOCAB) for _ in range(20))
            conversation[:] = run_one(system, conversation, 12)
    stats = explain.stats(system.scheduler.state)
    return stats.num_prompt_tokens - stats.num_cached_prompt_tokens


@pytest.mark.parametrize(("window", "share"), [(16, 0.3), *thorough((16, 0.5), (16, 0.9), (48, 0.3), (48, 0.5))])
def test_windows_cost_no_hits(window, share):
    """Windows are not evicted before the blocks that are of no use without them."""
    of_window, of_all = num_computed_in_turn((0, window), share), num_computed_in_turn((0, 0), share)
    assert of_window <= 1.1 * of_all


# Layer groups


@pytest.mark.parametrize("windows", [(0,), (0, 32, 32)])
def test_conversations_in_turn_keep_one_window_each(windows):
    """Four conversations share a system prompt and take turns. The pool has room for their 58 blocks. With windows it
    also has room for five windows in each layer group: of each conversation, and of the system prompt."""
    rng = seeded(5)
    system = agent(num_blocks=60 + 5 * 8 * (len(windows) - 1), windows=windows, watermark=0.0)
    system.join()
    shared = rng.choices(range(96), k=40)
    texts, num_known = [shared] * 4, 0  # tokens whose K and V are computed
    for _ in range(4):
        for i, text in enumerate(texts):
            system.now += 1.0
            texts[i] = run_one(system, [*text, *rng.choices(range(96), k=6)], 6)
            num_known = min(num_known, len(shared)) if text is shared else len(text) - 1
            assert system.ended[max(system.ended)].num_cached_tokens == num_known // 4 * 4
            num_known = len(texts[i])
