"""The queue of waiting groups, compared with a plain list that is sorted again for every question."""

from typing import Any

import pytest

from pagewire.common.wire.messages import SamplingParams
from scheduler_service.core.policy import POLICIES, Policy, WaitingState, create_policy
from scheduler_service.core.request import BeamParams, Request
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.waiting_queue import WaitingQueue
from testing.seeds import seeded


def item(policy: Policy, arrival: int, tenant: str = "", n: int = 1, **fields: Any) -> SequenceGroup:
    request = Request(str(arrival), tenant, (1, 2, 3), SamplingParams(), 1, n=n, **fields)
    standing = WaitingState(arrived_at=0.0, has_precedence=False, num_blocks=0, num_uncached_blocks=0)
    order, waiting_order = policy.running_key(request, arrival), policy.key(request, arrival, standing)
    return SequenceGroup(request, arrival, order, arrived_at=0.0, waiting_order=waiting_order, num_unfinished=n)


def num_sequences(groups: list[SequenceGroup]) -> int:
    """Return the number of sequences of the waiting groups; a beam search begins with one."""
    return sum(1 if group.request.beam else group.request.n for group in groups)


def filled(name: str, tenants: str) -> tuple[WaitingQueue, list[SequenceGroup], Policy]:
    """Return a queue with one group for each letter of `tenants`, in order, with the groups and the policy."""
    policy = create_policy(name)
    queue: WaitingQueue = WaitingQueue(policy)
    items = [item(policy, arrival, tenant) for arrival, tenant in enumerate(tenants)]
    for i, group in enumerate(items):
        if group.request.tenant not in tenants[:i]:
            policy.arrived(group.request.tenant)
        queue.add(group)
    return queue, items, policy


def test_an_empty_queue_has_nothing() -> None:
    queue: WaitingQueue = WaitingQueue(create_policy("fcfs"))
    assert queue.next() is None
    assert (len(queue), queue.num_sequences, queue.num_prompt_tokens, list(queue)) == (0, 0, 0, [])


def test_readded_group_returns_to_its_old_position() -> None:
    queue, items, _ = filled("fcfs", "aaa")
    queue.remove(items[0])
    queue.remove(items[1])
    queue.add(items[0])
    assert list(queue) == [items[0], items[2]]
    assert queue.position(items[2]) == 2


def test_a_group_that_is_not_queued_cannot_be_removed() -> None:
    queue, items, _ = filled("fcfs", "ab")
    queue.remove(items[0])
    with pytest.raises(KeyError):
        queue.remove(items[0])


def test_under_fair_the_tenant_that_got_least_is_next() -> None:
    queue, items, policy = filled("fair", "aaab")
    assert queue.next() is items[0]
    policy.charge("a", 1, 0)
    assert queue.next() is items[3]
    assert list(queue) == [items[3], *items[:3]]
    assert [queue.position(group) for group in items] == [2, 3, 4, 1]


def test_a_flood_does_not_starve_the_other_tenant() -> None:
    queue, items, policy = filled("fair", "a" * 100 + "b" * 10)
    served = []
    for _ in range(20):
        group = queue.next()
        assert group is not None
        queue.remove(group)
        policy.charge(group.request.tenant, 10, 0)
        served.append(group.request.tenant)
    assert served.count("b") == 10
    assert len(queue) == len(items) - 20


def test_a_group_that_is_held_counts_and_is_not_next() -> None:
    queue, items, _ = filled("fcfs", "ab")
    queue.hold(items[0])
    assert queue.next() is items[1]
    assert list(queue) == [items[1]]
    assert (len(queue), queue.num_tenant_sequences("a"), queue.position(items[1])) == (2, 1, 1)
    queue.release(items[0])
    assert queue.next() is items[0]
    with pytest.raises(KeyError):
        queue.release(items[0])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_sorted_list(name: str, seed: int) -> None:
    rng = seeded(seed)
    policy = create_policy(name)
    queue: WaitingQueue = WaitingQueue(policy)
    tenants = [f"t{i}" for i in range(rng.choice([1, 2, 7]))]
    for tenant in tenants:
        policy.arrived(tenant)
    waiting: list[SequenceGroup] = []
    held: list[SequenceGroup] = []
    for arrival in range(400):
        if held and rng.random() < 0.15:
            group = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                queue.remove(group)
            else:
                queue.release(group)
                waiting.append(group)
        elif waiting and rng.random() < 0.15:
            group = waiting.pop(rng.randrange(len(waiting)))
            queue.hold(group)
            held.append(group)
        elif waiting and rng.random() < 0.2:
            group = rng.choice(waiting)
            num_uncached_blocks = rng.choice([0, 1, rng.randrange(1000)])
            standing = WaitingState(0.0, rng.random() < 0.2, 1000, num_uncached_blocks)
            queue.reorder(group, policy.key(group.request, group.arrival, standing))
        elif rng.random() < 0.55 or not waiting:
            group = item(
                policy,
                arrival,
                rng.choice(tenants),
                rng.choice([1, 1, 3]),
                priority=rng.randint(0, 2),
                deadline=rng.choice([None, rng.random()]),
                beam=rng.choice([None, BeamParams(3)]),
            )
            waiting.append(group)
            queue.add(group)
        else:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        policy.charge(rng.choice(tenants), rng.randint(0, 9), rng.randint(0, 9))
        waiting.sort(key=lambda group: (policy.rank(group.request.tenant), group.waiting_order))
        assert list(queue) == waiting
        everyone = [*waiting, *held]
        assert list(queue.held) == held
        assert (len(queue), queue.num_sequences) == (len(everyone), num_sequences(everyone))
        assert queue.num_prompt_tokens == 3 * len(everyone)
        assert [queue.position(group) for group in waiting[:5]] == list(range(1, len(waiting[:5]) + 1))
        assert queue.next() is (waiting[0] if waiting else None)
        for tenant in tenants:
            of_tenant = [group for group in everyone if group.request.tenant == tenant]
            assert queue.num_tenant_sequences(tenant) == num_sequences(of_tenant)
