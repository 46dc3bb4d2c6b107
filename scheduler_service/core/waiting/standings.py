"""What each waiting group would cost, and whether it has waited long enough, for policies whose keys follow that."""

from collections import OrderedDict
from collections.abc import Callable

from scheduler_service.core.cache import Cursor
from scheduler_service.core.epoch import Epoch
from scheduler_service.core.policy import Policy, Standing
from scheduler_service.core.retention import Expectation, Retention
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.waiting.waiting_queue import WaitingQueue

_BLOCK_SIZE = 16  # until a worker's is known
_UNKNOWN = Standing(arrived_at=0.0, has_precedence=False, num_blocks=0, num_uncached_blocks=0)  # where keys do not move


def num_uncached_tokens(group: SequenceGroup) -> int:
    """Count the tokens of its prompt that a waiting group would compute if it began now, as far as that is known."""
    cursor = group.cursor
    return len(group.request.prompt_token_ids) - (0 if cursor is None else cursor.num_blocks * cursor.block_size)


class Standings:
    """Keeps the orders of the groups in a queue what the policy says they are.

    A group that has not run yet has a cursor in the worker's prefix index: only what changes on its own prefix moves
    it, so keeping the order costs time in proportion to what has changed. Nothing is kept where the policy's keys do
    not move.
    """

    def __init__(self, policy: Policy, waiting: WaitingQueue, new_expectation: Callable[[], Expectation]) -> None:
        self._policy = policy
        self._waiting = waiting
        self._new_expectation = new_expectation
        self._epoch: Epoch | None = None
        self._retention: Retention | None = None
        self._followed: dict[Cursor, SequenceGroup] = {}
        # Those that have neither run nor waited too long, in order of arrival.
        self._fresh: OrderedDict[SequenceGroup, None] = OrderedDict()

    def join(self, epoch: Epoch, groups: list[SequenceGroup], now: float) -> None:
        """A worker is there, and these groups wait: they are ordered by what it has cached."""
        if not self._policy.moves_keys:
            return
        self._epoch, self._retention = epoch, Retention(epoch.cache, self._new_expectation())
        for group in groups:
            self._arrive(group, epoch, self._retention, now)
            self._waiting.reorder(group, self.order(group))

    def lose(self) -> None:
        """The worker is gone, and its cache with it."""
        self._epoch = self._retention = None
        self._followed.clear()

    def add(self, group: SequenceGroup, now: float) -> None:
        """A group is about to wait for the first time: its order becomes that of its place."""
        if self._policy.moves_keys:
            self._fresh[group] = None
            if self._epoch is not None and self._retention is not None:
                self._arrive(group, self._epoch, self._retention, now)
        group.waiting_order = self.order(group)

    def enter(self, group: SequenceGroup) -> None:
        """A group that ran is about to wait: its order becomes that of its place."""
        if self._policy.moves_keys:
            group.waiting_order = self.order(group)
            if self._retention is not None:
                self._retention.waits(group)

    def leave(self, group: SequenceGroup) -> None:
        """A group waits no longer."""
        self._fresh.pop(group, None)
        if self._retention is not None:
            self._unfollow(group)
            self._retention.runs(group)

    def end(self, group: SequenceGroup, num_tokens: int, now: float) -> None:
        """A group that waits no longer is over. It had computed so many tokens, or none if it never ran."""
        if self._retention is not None:
            self._retention.ended(group, num_tokens, now)

    def update(self, now: float) -> None:
        """Put those in their places whose prefix has changed in the cache, and those that have waited too long."""
        if self._epoch is not None and self._retention is not None:
            self._retention.update(now)
            for cursor in self._epoch.cache.index.take_moved_cursors():
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
        """Whether what is cached of a group that waits is, at its end, on the host alone."""
        return group.cursor is not None and group.cursor.num_blocks > 0 and not group.cursor.node.blocks

    def order(self, group: SequenceGroup) -> tuple[object, ...]:
        """Ask the policy for the order of a group as things are now."""
        if not self._policy.moves_keys:
            return self._policy.key(group.request, group.arrival, _UNKNOWN)
        block_size = _BLOCK_SIZE if self._epoch is None else self._epoch.cache.block_size
        num_blocks = -(-len(group.request.prompt_token_ids) // block_size)
        num_uncached_blocks = -(-num_uncached_tokens(group) // block_size)
        standing = Standing(group.arrived_at, group.has_precedence, num_blocks, num_uncached_blocks)
        return self._policy.key(group.request, group.arrival, standing)

    def _arrive(self, group: SequenceGroup, epoch: Epoch, retention: Retention, now: float) -> None:
        """Tell a worker's cache of a group that waits."""
        sequence = group.sequences[0]
        if not group.has_precedence and epoch.cache.matches(sequence):
            max_blocks = (sequence.num_tokens - 1) // epoch.cache.block_size
            group.cursor = epoch.cache.index.follow(sequence.root_key, sequence.token_ids, max_blocks)
            self._followed[group.cursor] = group
        retention.arrived(group, now)
        retention.waits(group)

    def _unfollow(self, group: SequenceGroup) -> None:
        if group.cursor is not None:
            assert self._epoch is not None
            del self._followed[group.cursor]
            self._epoch.cache.index.unfollow(group.cursor)
            group.cursor = None
