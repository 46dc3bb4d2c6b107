"""The queue of waiting requests, and the number of tokens that each would compute if it started now."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from scheduler_service.core.cache import CacheManager, Cursor
from scheduler_service.core.policy import Policy, WaitingState
from scheduler_service.core.retention import Retention, ReturnEstimate
from scheduler_service.core.sequence import SequenceGroup

_order = attrgetter("waiting_order")
_BLOCK_SIZE = 16  # until a worker's block size is known
_UNKNOWN = WaitingState(
    arrived_at=0.0, has_precedence=False, num_blocks=0, num_uncached_blocks=0
)  # if keys do not move


class WaitingQueue:
    """The queue of waiting requests, ordered by (rank of the tenant, order of the request among its tenant's requests).

    The queue informs the scheduling policy when a tenant starts or stops waiting. Each tenant has a sorted list of
    requests. If the policy does not rank tenants, one list contains all requests. The first requests of the lists are
    compared at each query, because ranks may change at any time. Held requests wait for something else, such as their
    grammar. They count like all others but have no position, so no other request waits for them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: dict[str, list[SequenceGroup]] = {}  # sorted, by tenant, or all under ""; no list is empty
        self.held: dict[SequenceGroup, None] = {}
        self._num_sequences: dict[str, int] = {}  # by tenant, if any
        self.num_sequences = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        """Return the number of waiting requests. Held requests, which must wait for something else first (such as their
        grammar), are included."""
        return len(self.held) + sum(map(len, self._groups.values()))

    def add(self, group: SequenceGroup) -> None:
        """Add a request to the queue, when it is new or after a preemption. Its `waiting_order` must be set, and
        determines its position."""
        group.num_waiting_sequences = 1 if group.request.beam else group.num_unfinished
        self._place(group)
        self._count(group, 1)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a request from the queue. Raises KeyError if the request is not in the queue."""
        if group in self.held:
            del self.held[group]
        else:
            self._displace(group)
        self._count(group, -1)

    def hold(self, group: SequenceGroup) -> None:
        """Mark a request in the queue as held: it must wait for something else first, such as its grammar, and `next`
        does not return it. Raises KeyError if the request is not in the queue or is held already."""
        self._displace(group)
        self.held[group] = None

    def release(self, group: SequenceGroup) -> None:
        """Give a held request its position in the queue again, for example because its grammar is ready now. Raises
        KeyError if the request is not held."""
        del self.held[group]
        self._place(group)

    def reorder(self, group: SequenceGroup, order: tuple[Any, ...]) -> None:
        """Change the `waiting_order` of a request in the queue, and move the request to the position for its new
        order."""
        if order == group.waiting_order:
            return
        if group in self.held:
            group.waiting_order = order
            return
        groups = self._groups[self._list_name(group)]
        del groups[self._index(groups, group)]
        group.waiting_order = order
        insort(groups, group, key=_order)

    def _list_name(self, group: SequenceGroup) -> str:
        return group.request.tenant if self._policy.ranks_tenants else ""

    def _place(self, group: SequenceGroup) -> None:
        name = self._list_name(group)
        if name not in self._groups:
            self._policy.queued(name)
            self._groups[name] = []
        insort(self._groups[name], group, key=_order)

    def _displace(self, group: SequenceGroup) -> None:
        name = self._list_name(group)
        groups = self._groups[name]
        del groups[self._index(groups, group)]
        if not groups:
            del self._groups[name]
            self._policy.unqueued(name)

    def _index(self, groups: list[SequenceGroup], group: SequenceGroup) -> int:
        index = bisect_left(groups, group.waiting_order, key=_order)
        if index == len(groups) or groups[index] is not group:
            raise KeyError(group.waiting_order)
        return index

    def next(self) -> SequenceGroup | None:
        """Return the first waiting request in the queue, or None if the queue is empty or all its requests are held
        (waiting for something else, such as their grammar).

        The time is O(tenants) if the policy ranks tenants, else O(1).
        """
        return min((groups[0] for groups in self._groups.values()), key=self._ranked_order, default=None)

    def first(self, number: int) -> list[SequenceGroup]:
        """Return the first waiting requests of the queue in order, up to `number` for each tenant. Held requests (which
        wait for something else, such as their grammar) are left out.

        If the policy does not rank tenants, the limit `number` is for all tenants together.
        """
        return sorted((each for groups in self._groups.values() for each in groups[:number]), key=self._ranked_order)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Iterate over the waiting requests, sorted by the present rank of the tenant and then by `waiting_order`. Held
        requests (which wait for something else, such as their grammar) are left out."""
        return iter(sorted((group for groups in self._groups.values() for group in groups), key=self._ranked_order))

    def _ranked_order(self, group: SequenceGroup) -> tuple[float, tuple[Any, ...]]:
        return self._policy.rank(group.request.tenant), group.waiting_order

    def position(self, group: SequenceGroup) -> int:
        """Return the position of a waiting request in the queue, counted from 1, with the tenants' present ranks. The
        request must not be held (waiting for something else, such as its grammar)."""
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

    def _count(self, group: SequenceGroup, sign: int) -> None:
        tenant, num_sequences = group.request.tenant, sign * group.num_waiting_sequences
        self.num_sequences += num_sequences
        self._num_sequences[tenant] = self._num_sequences.get(tenant, 0) + num_sequences
        if not self._num_sequences[tenant]:
            del self._num_sequences[tenant]
        self.num_prompt_tokens += sign * len(group.request.prompt_token_ids)


def num_uncached_tokens(group: SequenceGroup) -> int:
    """Return how many prompt tokens a waiting request would have to compute if it started now. Without a cursor in the
    prefix index, the whole prompt is counted."""
    cursor = group.cursor
    return len(group.request.prompt_token_ids) - (0 if cursor is None else cursor.num_usable_blocks * cursor.block_size)


class WaitingOrder:
    """The order of the waiting requests, kept up to date as the scheduling policy demands.

    A request that has not run yet has a cursor, which marks the end of its cached blocks in the worker's prefix index.
    The cursor moves only if the cached part of this prompt changes. So the time to keep the order is proportional to
    the number of such changes. Nothing is tracked if the policy's keys do not depend on the cache.
    """

    def __init__(self, policy: Policy, waiting: WaitingQueue, new_expectation: Callable[[], ReturnEstimate]) -> None:
        self._policy = policy
        self._waiting = waiting
        self._new_expectation = new_expectation
        self._retention: Retention | None = None  # for the connected worker, if keys move
        self._followed: dict[Cursor, SequenceGroup] = {}
        # Groups that have neither run nor waited too long, in order of arrival.
        self._fresh: OrderedDict[SequenceGroup, None] = OrderedDict()

    def join(self, cache: CacheManager, groups: list[SequenceGroup], now: float) -> None:
        """Recompute the order of all waiting requests after a worker has connected.

        The order depends on the tokens of each prompt that are in the worker's KV cache, which is `cache`.
        """
        if not self._policy.moves_keys:
            return
        self._retention = Retention(cache, self._new_expectation())
        for group in groups:
            self._arrive(group, self._retention, now)
            self._waiting.reorder(group, self.order(group))

    def lose(self, groups: Iterable[SequenceGroup]) -> None:
        """Remove the cursors and sessions of the waiting requests, because the worker was lost and they refer to its
        cache."""
        for group in groups:
            group.cursor = None
            if self._retention is not None:
                self._retention.lose(group)
        self._retention = None
        self._followed.clear()

    def add(self, group: SequenceGroup, now: float) -> None:
        """Set the `waiting_order` of a new request before it is added to the queue, and start to track its cached
        prefix if the policy needs that."""
        if self._policy.moves_keys:
            self._fresh[group] = None
            if self._retention is not None:
                self._arrive(group, self._retention, now)
        group.waiting_order = self.order(group)

    def enter(self, group: SequenceGroup) -> None:
        """Set the `waiting_order` of a request that has run before and is about to be added to the queue again."""
        if self._policy.moves_keys:
            group.waiting_order = self.order(group)
            if self._retention is not None:
                self._retention.waits(group)

    def leave(self, group: SequenceGroup) -> None:
        """Stop tracking the cached prefix of a request, because it has left the queue of waiting requests."""
        self._fresh.pop(group, None)
        if self._retention is not None:
            if group.cursor is not None:
                del self._followed[group.cursor]
                self._retention.cache.index.unfollow(group.cursor)
                group.cursor = None
            self._retention.runs(group)

    def end(self, group: SequenceGroup, num_tokens: int, now: float) -> None:
        """Record that a request has ended, so that the idle KV cache blocks of its session (conversation) get a new
        eviction priority.

        `num_tokens` is the number of tokens that were computed for the request, or 0 if it never ran.
        """
        if self._retention is not None:
            self._retention.ended(group, num_tokens, now)

    def update(self, now: float) -> None:
        """Move the waiting requests whose order has changed to their new positions: requests with a new length of the
        cached prefix, and requests that have waited longer than the policy's longest wait."""
        if self._retention is not None:
            self._retention.update(now)
            for cursor in self._retention.cache.index.cursors.take_moved():
                group = self._followed[cursor]
                self._waiting.reorder(group, self.order(group))
                self._retention.waits(group)
        while self._fresh:
            group = next(iter(self._fresh))
            if now - group.arrived_at < self._policy.max_wait_s:
                break
            del self._fresh[group]
            group.is_overdue = True
            self._waiting.reorder(group, self.order(group))

    def awaits_load(self, group: SequenceGroup) -> bool:
        """Return whether a waiting request has a cached prefix whose last block is only on the host. This block must be
        loaded onto the device before it can be used."""
        return group.cursor is not None and group.cursor.awaits_load

    def order(self, group: SequenceGroup) -> tuple[object, ...]:
        """Return the present sort key of a waiting request under the scheduling policy. The request with the lowest key
        is scheduled next."""
        if not self._policy.moves_keys:
            return self._policy.key(group.request, group.arrival, _UNKNOWN)
        block_size = _BLOCK_SIZE if self._retention is None else self._retention.cache.block_size
        num_blocks = -(-len(group.request.prompt_token_ids) // block_size)
        num_uncached_blocks = -(-num_uncached_tokens(group) // block_size)
        standing = WaitingState(group.arrived_at, group.has_precedence, num_blocks, num_uncached_blocks)
        return self._policy.key(group.request, group.arrival, standing)

    def _arrive(self, group: SequenceGroup, retention: Retention, now: float) -> None:
        """Start to track a waiting request in a worker's cache: create a cursor, which follows the cached prefix of its
        prompt, and assign the request to a session (conversation)."""
        sequence, cache = group.sequences[0], retention.cache
        if not group.has_precedence and cache.enable_prefix_caching and sequence.may_match:
            max_blocks = (sequence.num_tokens - 1) // cache.block_size
            group.cursor = cache.index.follow(sequence.allocation.root, sequence.token_ids, max_blocks)
            self._followed[group.cursor] = group
        retention.arrived(group, now)
        retention.waits(group)
