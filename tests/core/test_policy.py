"""The order of requests under each policy."""

import pytest

from pagewire.common.wire.messages import SamplingParams
from scheduler_service.core.policy import POLICIES, FairPolicy, WaitingState, create_policy
from scheduler_service.core.request import Request
from testing.seeds import seeded

FRESH = WaitingState(arrived_at=0.0, has_precedence=False, num_blocks=0, num_uncached_blocks=0)


def request(tenant: str = "", priority: int = 0, deadline: float | None = None) -> Request:
    return Request("r", tenant, (1,), SamplingParams(), 1, priority=priority, deadline=deadline)


def served(name: str, requests: list[Request]) -> list[int]:
    policy = create_policy(name)
    keys = [policy.key(request, arrival, FRESH) for arrival, request in enumerate(requests)]
    return sorted(range(len(requests)), key=lambda i: keys[i])


def test_static_orders() -> None:
    requests = [request(priority=1), request(priority=0, deadline=9.0), request(priority=1, deadline=5.0), request()]
    assert served("fcfs", requests) == [0, 1, 2, 3]
    assert served("priority", requests) == [1, 3, 0, 2]
    assert served("fair", requests) == [1, 3, 0, 2]
    assert served("agent", requests) == [1, 3, 0, 2]
    assert served("deadline", requests) == [2, 1, 3, 0]


def test_the_share_of_a_prompt_that_is_cached_is_worth_as_much_as_waiting() -> None:
    policy = create_policy("agent", 600.0)

    def turn(arrived_at: float, num_blocks: int, num_uncached_blocks: int) -> float:
        standing = WaitingState(arrived_at, False, num_blocks, num_uncached_blocks)
        return policy.key(request(), 0, standing)[2]

    # With 16 added to both numbers, 1,008 blocks and 496 uncached blocks are 1,024 and 512: one halving.
    assert turn(400.0, 1008, 496) == turn(0.0, 1008, 1008)
    assert turn(0.0, 10_000, 10_000) == turn(0.0, 1, 1), "what finds nothing keeps the order of arrival"
    assert turn(300.0, 1008, 400) < turn(0.0, 20, 20) < turn(500.0, 1008, 600)


def test_fair_sharing_lets_no_priority_preempt_another_tenant() -> None:
    policy = create_policy("fair")
    polite, hostile = request("polite", priority=0), request("hostile", priority=-(2**31))
    assert policy.running_key(polite, 1) < policy.running_key(hostile, 2)
    assert create_policy("agent").running_key(hostile, 2) == policy.running_key(hostile, 2)
    assert policy.running_key(request(priority=-1), 2) < policy.running_key(polite, 1), "no tenant's, or an operator's"
    for name in set(POLICIES) - {"fair", "agent"}:
        static = create_policy(name)
        assert static.running_key(hostile, 2) == static.key(hostile, 2, FRESH)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_has_its_name(name: str) -> None:
    assert create_policy(name).name == name


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="policy is 'best', choose one of agent, priority, fcfs, fair, deadline"):
        create_policy("best")


def begin(policy: FairPolicy, *tenants: str) -> None:
    for tenant in tenants:
        policy.arrived(tenant)
        policy.queued(tenant)


def test_output_counts_twice() -> None:
    policy = FairPolicy()
    begin(policy, "a", "b")
    policy.charge("a", 100, 0)
    policy.charge("b", 0, 51)
    assert policy.rank("a") == 100
    assert policy.rank("b") == 102


def test_new_tenant_starts_at_lowest_counter_of_waiting_tenants() -> None:
    policy = FairPolicy()
    begin(policy, "a", "b", "runs")
    policy.unqueued("runs")
    policy.charge("a", 100, 0)
    policy.charge("b", 70, 0)
    begin(policy, "new")
    assert policy.rank("new") == 70


def test_tenant_without_long_waits_accumulates_no_credit() -> None:
    policy = FairPolicy()
    begin(policy, "a", "b")
    policy.unqueued("b")  # the tenant runs, with a counter of 0
    policy.charge("a", 1000, 0)
    policy.queued("b")
    assert policy.rank("b") == 1000


def test_new_tenant_starts_at_last_waiting_counter_if_none_waits() -> None:
    policy = FairPolicy()
    begin(policy, "a")
    policy.unqueued("a")
    policy.charge("a", 30, 10)
    begin(policy, "b")
    assert policy.rank("b") == 50


def test_a_tenant_that_comes_back_keeps_what_it_owes() -> None:
    policy = FairPolicy()
    begin(policy, "a", "b")
    policy.charge("b", 500, 0)
    policy.unqueued("b")
    policy.left("b")
    begin(policy, "b")
    assert policy.rank("b") == 500


def test_nothing_is_kept_when_all_have_left() -> None:
    policy = FairPolicy()
    begin(policy, "a", "b")
    for tenant in ("a", "b"):
        policy.charge(tenant, 100, 0)
        policy.unqueued(tenant)
        policy.left(tenant)
    begin(policy, "a")
    assert policy.rank("a") == 0


def test_counters_of_absent_tenants_do_not_pile_up() -> None:
    policy = FairPolicy()
    begin(policy, "stays")
    for i in range(10_000):
        begin(policy, f"t{i}")
        policy.charge(f"t{i}", 1, 0)
        policy.charge("stays", 2, 0)
        policy.unqueued(f"t{i}")
        policy.left(f"t{i}")
    assert len(policy._counters) < 300


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_wait_get_equal_service_up_to_the_bound(seed: int) -> None:
    """The server holds `capacity` running tokens. Every tenant always has a waiting request, of any size."""
    rng = seeded(seed)
    policy = FairPolicy()
    sizes = {"a": rng.randint(1, 50), "b": rng.randint(50, 400), "c": rng.randint(1, 400)}
    tenants, capacity, outputs = list(sizes), 1000, rng.choice([1, 5, 20])
    begin(policy, *tenants)
    service = dict.fromkeys(tenants, 0)
    running: list[tuple[str, int]] = []
    bound = 2 * max(max(sizes.values()), 2 * capacity)
    while min(service.values()) < 10 * bound:
        while sum(sizes[tenant] + outputs for tenant, _ in running) <= capacity - 400 - outputs:
            tenant = min(tenants, key=lambda name: (policy.rank(name), name))
            policy.charge(tenant, sizes[tenant], 0)
            service[tenant] += sizes[tenant]
            running.append((tenant, outputs))
        for tenant, _ in running:
            policy.charge(tenant, 0, 1)
            service[tenant] += 2
        running = [(tenant, left - 1) for tenant, left in running if left > 1]
        assert max(service.values()) - min(service.values()) <= bound
