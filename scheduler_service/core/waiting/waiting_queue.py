"""The requests that wait, in the order of a policy."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop
from operator import attrgetter
from typing import Any

from scheduler_service.core.policy import Policy
from scheduler_service.core.sequence import SequenceGroup

_order = attrgetter("waiting_order")


class WaitingQueue:
    """Groups in order of (rank of the tenant, order of the group). It tells the policy who begins and ends to wait.

    Each tenant has a sorted list. Where ranks do not matter, the first ones of all tenants are kept sorted; where they
    do, they are compared when they are asked for, since ranks change at any time. Groups that are held count as all
    others do, but have no place: no group waits behind them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, list[SequenceGroup]] = {}  # by tenant, in order; none is empty
        self._heads: list[SequenceGroup] = []  # the first of every tenant in order; empty where ranks matter
        self.held: dict[SequenceGroup, None] = {}
        self._num_groups = 0
        self._num_sequences: dict[str, int] = {}  # by tenant, where there are any
        self.num_sequences = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        """How many groups wait, also of those that are held."""
        return self._num_groups

    def add(self, group: SequenceGroup) -> None:
        """Let a group wait, for the first time or again: its order says where it belongs."""
        group.num_waiting_sequences = 1 if group.request.beam else group.num_unfinished
        self._place(group)
        self._count(group, 1)

    def remove(self, group: SequenceGroup) -> None:
        """Let a group wait no longer. Raises KeyError for one that is not queued."""
        if group in self.held:
            del self.held[group]
        else:
            self._displace(group)
        self._count(group, -1)

    def hold(self, group: SequenceGroup) -> None:
        """Let a group wait for something else than its turn. Raises KeyError for one that has no place."""
        self._displace(group)
        self.held[group] = None

    def release(self, group: SequenceGroup) -> None:
        """Let a group that was held wait for its turn: its order says where. Raises KeyError for one that is not."""
        del self.held[group]
        self._place(group)

    def reorder(self, group: SequenceGroup, order: tuple[Any, ...]) -> None:
        """Give a group that is queued another order, and its place by it."""
        if order == group.waiting_order:
            return
        if group in self.held:
            group.waiting_order = order
            return
        groups = self._groups[group.request.tenant]
        head = groups[0]
        del groups[self._index(groups, group)]
        rest = groups[0] if groups else None
        self._change_head(head, rest)  # which looks the old one up by its order
        group.waiting_order = order
        insort(groups, group, key=_order)
        self._change_head(rest, groups[0])

    def _place(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        groups = self._groups.get(tenant)
        if groups is None:
            self._policy.queued(tenant)
            groups = self._groups[tenant] = []
        head = groups[0] if groups else None
        insort(groups, group, key=_order)
        self._change_head(head, groups[0])

    def _displace(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        groups = self._groups[tenant]
        head = groups[0]
        del groups[self._index(groups, group)]
        self._change_head(head, groups[0] if groups else None)
        if not groups:
            del self._groups[tenant]
            self._policy.unqueued(tenant)

    def _index(self, groups: list[SequenceGroup], group: SequenceGroup) -> int:
        index = bisect_left(groups, group.waiting_order, key=_order)
        if index == len(groups) or groups[index] is not group:
            raise KeyError(group.waiting_order)
        return index

    def next(self, admits: Callable[[SequenceGroup], bool]) -> SequenceGroup | None:
        """The first group that `admits` accepts, or None. Only the first group of each tenant is asked for."""
        return next(filter(admits, self._candidates()), None)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Go through the groups that are not held, in the order in which they would be served if no rank changed."""
        groups = [group for tenant in self._groups.values() for group in tenant]
        return iter(sorted(groups, key=lambda group: (self._policy.rank(group.request.tenant), group.waiting_order)))

    def position(self, group: SequenceGroup) -> int:
        """The place of a queued group that is not held, from 1, in the order in which groups would be served if no rank
        changed."""
        rank = self._policy.rank(group.request.tenant)
        num_before = 0
        for tenant, groups in self._groups.items():
            other = self._policy.rank(tenant)
            if other < rank:
                num_before += len(groups)
            elif other == rank:
                num_before += bisect_left(groups, group.waiting_order, key=_order)
        return num_before + 1

    def num_tenant_sequences(self, tenant: str) -> int:
        return self._num_sequences.get(tenant, 0)

    def _candidates(self) -> Iterator[SequenceGroup]:
        """The first group of every tenant, in order. O(1) for the first where ranks do not matter, else O(tenants)."""
        if not self._policy.ranks_tenants:
            yield from self._heads
            return
        heads = [
            (self._policy.rank(tenant), groups[0].waiting_order, groups[0]) for tenant, groups in self._groups.items()
        ]
        heapify(heads)
        while heads:
            yield heappop(heads)[2]

    def _change_head(self, old: SequenceGroup | None, new: SequenceGroup | None) -> None:
        if self._policy.ranks_tenants or old is new:
            return
        if old is not None:
            del self._heads[bisect_left(self._heads, old.waiting_order, key=_order)]
        if new is not None:
            insort(self._heads, new, key=_order)

    def _count(self, group: SequenceGroup, sign: int) -> None:
        tenant, num_sequences = group.request.tenant, sign * group.num_waiting_sequences
        self._num_groups += sign
        self.num_sequences += num_sequences
        self._num_sequences[tenant] = self._num_sequences.get(tenant, 0) + num_sequences
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]
        self.num_prompt_tokens += sign * len(group.request.prompt_token_ids)
