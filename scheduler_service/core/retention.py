"""Which idle blocks are kept longest: those of sessions that are about to need them.

A session is a conversation, an agent's work, or whatever else sends requests of which each begins with the one before.
Its idle blocks stand in a free list of their own, in both tiers, and the list of the lowest priority is emptied first.
Blocks with which nothing is lost, because the host has them too, are not in such lists: they go before all others.

Tenants share the cache: what one has used lately, or hinted to keep, is lost to others only while it has as many idle
blocks as any of them. So hints and waiting requests order a tenant's own sessions, and empty no other tenant's cache.
"""

import math

from scheduler_service.core.cache import CacheManager, RetentionPriority
from scheduler_service.core.sequence import SequenceGroup, Session

# The priority of a free list begins with one of these: no request is expected to use its blocks, one may, the session
# has a request, one waits and will use them.
GIVEN_UP, IDLE, PRESENT, AWAITED = 0.0, 1.0, 2.0, 3.0
# A request that names no session goes on with one if it begins with at least this part of what that has computed.
_CONTINUED_SHARE = 0.5
_SHARED_S = 300.0  # after its last use, or the end of its hinted retention, a session's tenant has no share for it
_NUM_LOST = 64  # sessions without blocks that are kept before it is looked up which these are
_MIN_GAP_S = 0.1
_PRIOR_GAPS = 3  # the gaps of everybody count as many as these of a session's own
_NUM_GAPS = 10  # a session's own gaps that its mean looks back on, and everybody's
_NUM_ALL_GAPS = 1000


class Expectation:
    """What is expected of the return of sessions: those are back first who were there last, so the least recently used
    is lost first."""

    def returned(self, session: Session, gap_s: float) -> None:
        """A session that had no requests has one, `gap_s` seconds after its last one ended."""

    def last_needed_at(self, session: Session) -> float:
        """Order the sessions that have no requests: the blocks of the lowest are lost first. In seconds of the caller's
        clock, as though the session had been there last at that time. Asked for when its last request has ended."""
        return session.last_used_at


class ReturnTimes(Expectation):
    """Learns how long sessions stay away, and expects those back first whose chance to return now is best.

    Gaps between requests have long tails. If they are Lomax distributed with a session's own scale g, the chance that
    it returns in the next moment, having been away for a, is in proportion to 1 / (a + g): the session with the least
    `last_used_at` - g is the least likely to be back. g is the geometric mean of a session's gaps, drawn towards that
    of all sessions while it has had few.
    """

    def __init__(self) -> None:
        self._num_gaps = 0
        self._mean_log_gap = 0.0

    def returned(self, session: Session, gap_s: float) -> None:
        log_gap = math.log(max(_MIN_GAP_S, gap_s))
        session.num_gaps = min(session.num_gaps + 1, _NUM_GAPS)
        session.mean_log_gap += (log_gap - session.mean_log_gap) / session.num_gaps
        self._num_gaps = min(self._num_gaps + 1, _NUM_ALL_GAPS)
        self._mean_log_gap += (log_gap - self._mean_log_gap) / self._num_gaps

    def last_needed_at(self, session: Session) -> float:
        if not self._num_gaps:
            return session.last_used_at
        own, prior = session.num_gaps * session.mean_log_gap, _PRIOR_GAPS * self._mean_log_gap
        return session.last_used_at - math.exp((own + prior) / (session.num_gaps + _PRIOR_GAPS))


# The default first.
EXPECTATIONS = {"lru": Expectation, "learned": ReturnTimes}


class Retention:
    """The sessions of one worker's cache, and the priority of their blocks."""

    def __init__(self, cache: CacheManager, expectation: Expectation) -> None:
        self.cache = cache
        self._expectation = expectation
        self._sessions: dict[int, Session] = {}  # by free list
        self._named: dict[tuple[str, str], Session] = {}  # by tenant and name
        self._unused_lists: list[int] = []
        self._num_kept = 0
        cache.tiers.set_priorities(self._priority_of, self._tenant_of, self._is_expected)

    def update(self, now: float) -> None:
        """Let sessions that were not used for long go before those that are used: no tenant's share protects them."""
        self.cache.pool.order.horizon = self.cache.host_pool.order.horizon = (IDLE, now - _SHARED_S)

    def arrived(self, group: SequenceGroup, now: float) -> None:
        """A group is there that this worker has not seen. Its cursor, if it may have one, has its place."""
        session = self._find(group) or self._begin(group, now)
        if session.num_blocks and not session.num_groups:
            session.has_returned = True
            self._expectation.returned(session, now - session.last_used_at)
        group.num_session_tokens = session.num_blocks * self.cache.block_size
        group.session_age_s = now - session.last_used_at
        session.num_groups += 1
        group.session = session
        for sequence in group.sequences:
            sequence.holding.free_list = session.free_list

    def waits(self, group: SequenceGroup) -> None:
        """A group that has arrived waits, or what is cached of it has changed."""
        if group.session is not None:
            group.session.waiting[group] = None
            self.cache.tiers.priority_changed(group.session.free_list)

    def runs(self, group: SequenceGroup) -> None:
        """A group no longer waits."""
        if group.session is not None and group in group.session.waiting:
            del group.session.waiting[group]
            self.cache.tiers.priority_changed(group.session.free_list)

    def ended(self, group: SequenceGroup, num_tokens: int, now: float) -> None:
        """A group that has arrived is over. It had computed so many tokens, or none if it never ran."""
        session = group.session
        if session is None:
            return
        self.lose(group)
        session.num_groups -= 1
        session.num_blocks = num_tokens // self.cache.block_size or session.num_blocks
        session.last_used_at = now
        session.will_return = group.request.will_return
        session.retention_s = float(group.request.retention_seconds or 0)
        self.cache.tiers.priority_changed(session.free_list)
        if len(self._sessions) > 2 * self._num_kept + _NUM_LOST:
            self._forget_lost()

    def lose(self, group: SequenceGroup) -> None:
        """A group is no part of a session any more."""
        group.session = None

    def _is_expected(self, free_list: int) -> bool:
        """Whether a session is away that has come back before, or says that it will. Who is there has its own loads
        ordered, and need not wait for others."""
        session = self._sessions.get(free_list)
        if session is None or session.num_groups or session.will_return is False:
            return False
        return session.has_returned or bool(session.will_return) or session.retention_s > 0

    def _tenant_of(self, free_list: int) -> str:
        session = self._sessions.get(free_list)
        return "" if session is None else session.tenant

    def _priority_of(self, free_list: int) -> RetentionPriority:
        """Whatever waits will use its blocks for certain, and sooner if it computes less."""
        session = self._sessions.get(free_list)
        if session is None:
            return (GIVEN_UP,)
        if session.waiting:
            cursors = [group.cursor for group in session.waiting]
            return AWAITED, -min(cursor.num_missing_blocks if cursor else 0 for cursor in cursors)
        if session.num_groups:
            return PRESENT, session.last_used_at
        if session.will_return is False:
            return GIVEN_UP, session.last_used_at
        if session.will_return:
            return IDLE, session.last_used_at + session.retention_s
        return IDLE, self._expectation.last_needed_at(session) + session.retention_s

    def _find(self, group: SequenceGroup) -> Session | None:
        """Find the session that a request goes on with: the one that it names, or whose blocks it begins with."""
        request, cursor = group.request, group.cursor
        if request.session_id:
            return self._named.get((request.tenant, request.session_id))
        if cursor is None or not cursor.num_blocks:
            return None
        node, cache = cursor.node, self.cache
        free_list = (
            cache.pool.free_list_of(node.blocks[0]) if node.blocks else cache.host_pool.free_list_of(node.host_block)
        )
        session = self._sessions.get(free_list)
        # The list may be another session's by now, if the block has not stood in one for long.
        if session is None or session.name or session.tenant != request.tenant:
            return None
        return session if cursor.num_blocks >= _CONTINUED_SHARE * session.num_blocks else None

    def _begin(self, group: SequenceGroup, now: float) -> Session:
        free_list = self._unused_lists.pop() if self._unused_lists else len(self._sessions) + 1
        session = Session(free_list, group.request.tenant, group.request.session_id, now)
        self._sessions[free_list] = session
        if session.name:
            self._named[session.tenant, session.name] = session
        return session

    def _forget_lost(self) -> None:
        """Forget sessions that have neither requests nor blocks."""
        pools = self.cache.pool, self.cache.host_pool
        moving = {move.free_list for move in self.cache.moves}
        for session in list(self._sessions.values()):
            has_blocks = session.free_list in moving or any(pool.has_blocks(session.free_list) for pool in pools)
            if not session.num_groups and not has_blocks:
                del self._sessions[session.free_list]
                self._unused_lists.append(session.free_list)
                if session.name:
                    del self._named[session.tenant, session.name]
        self._num_kept = len(self._sessions)
