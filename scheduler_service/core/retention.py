"""Retention: keeps the idle blocks of sessions that are likely to need them soon.

A session is a conversation, an agent's work, or any other series of requests in which each starts with the one before.
The idle blocks of a session have a free list of their own in both tiers. Blocks of the list with the lowest priority
are evicted first. Blocks whose content the host has too are not in these lists: they are evicted before all others.

Tenants share the cache. A tenant may have used blocks recently, or hinted to keep them. Other tenants evict such blocks
only while no tenant has more idle blocks. So hints and waiting requests order a tenant's own sessions, and never empty
another tenant's cache.
"""

import math

from scheduler_service.core.cache import CacheManager, RetentionPriority
from scheduler_service.core.sequence import SequenceGroup, Session

# The first element of a free list's priority. GIVEN_UP: no request is expected to use its blocks. IDLE: a request may
# use them. PRESENT: the session has a request. AWAITED: a waiting request will use them.
GIVEN_UP, IDLE, PRESENT, AWAITED = 0.0, 1.0, 2.0, 3.0
# A request without a session id continues a session if it matches at least this share of the session's computed blocks.
_CONTINUED_SHARE = 0.5
_SHARED_S = 300.0  # seconds of protection from other tenants after a session's last use or hinted retention
_NUM_LOST = 64  # number of new sessions before sessions without blocks are removed
_MIN_GAP_S = 0.1
_PRIOR_GAPS = 3  # weight of the mean over all sessions, in gaps of one session
_NUM_GAPS = 10  # number of recent gaps in the mean of one session, and of all sessions
_NUM_ALL_GAPS = 1000


class ReturnEstimate:
    """An estimate of when each idle session (a conversation without a current request) will send its next request. It
    decides which session's KV cache blocks are evicted first.

    This class expects the most recently used session to return first. So the least recently used session loses its
    blocks first.
    """

    def returned(self, session: Session, gap_s: float) -> None:
        """Record that an idle session has sent a new request, `gap_s` seconds after the end of its last request. An
        estimate may learn from this gap."""

    def last_needed_at(self, session: Session) -> float:
        """Return the sort key of an idle session: the session with the lowest key loses its KV cache blocks first. The
        method is called after the session's last request has ended.

        The key is a time in seconds of the caller's clock. It ranks the session like a session that was last used at
        this time.
        """
        return session.last_used_at


class LearnedReturnEstimate(ReturnEstimate):
    """An estimate that learns how long sessions stay away between their requests.

    The session most likely to return now is expected first. Gaps between requests have long tails. Assume that they are
    Lomax distributed, with a scale g for each session. If a session has been away for a time a, the chance that it
    returns in the next moment is proportional to 1 / (a + g). So the session with the least `last_used_at` - g is the
    least likely to return. g is the geometric mean of the session's gaps. For a session with few gaps, it is shifted
    towards the mean of all sessions.
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


# The first is the default.
EXPECTATIONS = {"lru": ReturnEstimate, "learned": LearnedReturnEstimate}


class Retention:
    """The sessions with requests or blocks in one worker's cache, and the order in which their idle KV cache blocks are
    evicted.

    A session is a series of requests in which each prompt starts with the previous prompt and output.
    """

    def __init__(self, cache: CacheManager, expectation: ReturnEstimate) -> None:
        self.cache = cache
        self._expectation = expectation
        self._sessions: dict[int, Session] = {}  # by free list
        self._named: dict[tuple[str, str], Session] = {}  # by tenant and name
        self._unused_lists: list[int] = []
        self._num_kept = 0
        cache.tiers.set_priorities(self._priority_of, self._tenant_of, self._is_expected)

    def update(self, now: float) -> None:
        """Update the time limit of the eviction order: idle sessions that were last used before this limit lose their
        KV cache blocks first, whichever tenant they belong to.

        The blocks of more recently used sessions are protected by their tenant's share of the cache.
        """
        for pool in self.cache.tiers.pools:
            pool.order.horizon = (IDLE, now - _SHARED_S)

    def arrived(self, group: SequenceGroup, now: float) -> None:
        """Assign a request to the session that it continues, or to a new session. Call this once for each request and
        worker.

        If the request uses a cursor in the prefix index, the cursor must exist already.
        """
        session = self._find(group) or self._begin(group, now)
        if session.num_blocks and not session.num_groups:
            session.has_returned = True
            self._expectation.returned(session, now - session.last_used_at)
        group.num_session_tokens = session.num_blocks * self.cache.block_size
        group.session_age_s = now - session.last_used_at
        session.num_groups += 1
        group.session = session
        for sequence in group.sequences:
            sequence.allocation.free_list = session.free_list

    def waits(self, group: SequenceGroup) -> None:
        """Record that a request of a session waits, and update the eviction priority of the session's KV cache blocks.
        Call this again when more or less of the request's prompt is cached."""
        if group.session is not None:
            group.session.waiting[group] = None
            self.cache.tiers.priority_changed(group.session.free_list)

    def runs(self, group: SequenceGroup) -> None:
        """Record that a request of a session has stopped waiting, and update the eviction priority of the session's KV
        cache blocks."""
        if group.session is not None and group in group.session.waiting:
            del group.session.waiting[group]
            self.cache.tiers.priority_changed(group.session.free_list)

    def ended(self, group: SequenceGroup, num_tokens: int, now: float) -> None:
        """Record that a request of a session has ended, and update the eviction priority of the session's KV cache
        blocks.

        `num_tokens` is the number of tokens that were computed for the request, or 0 if it never ran.
        """
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
        """Remove the link from a request to its session, because the request has ended or the worker was lost with its
        cache."""
        group.session = None

    def _is_expected(self, free_list: int) -> bool:
        """Return whether a session has no request now but will probably send one.

        This is assumed if the session has returned before, or if its last request set `will_return` or a retention
        time. The result is False if the last request set `will_return` to False, or if the session has requests now.
        Requests load the blocks that they need themselves.
        """
        session = self._sessions.get(free_list)
        if session is None or session.num_groups or session.will_return is False:
            return False
        return session.has_returned or bool(session.will_return) or session.retention_s > 0

    def _tenant_of(self, free_list: int) -> str:
        session = self._sessions.get(free_list)
        return "" if session is None else session.tenant

    def _priority_of(self, free_list: int) -> RetentionPriority:
        """Return the eviction priority of one session's idle KV cache blocks, which are in the free list `free_list`.
        Blocks with the lowest priority are evicted first.

        A session with a waiting request has a higher priority than all others, because it will certainly need its
        blocks. The fewer blocks of the request are not cached, the higher is the priority.
        """
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
        """Return the existing session that a request continues, or None.

        If the request names a session, the result is the session of that name. Otherwise it is an unnamed session of
        the same tenant, if the cached prefix of the prompt has at least half as many blocks as the session's last
        request.
        """
        request, cursor = group.request, group.cursor
        if request.session_id:
            return self._named.get((request.tenant, request.session_id))
        if cursor is None or not cursor.num_blocks:
            return None
        content, cache = cursor.node.contents[0], self.cache
        free_list = (
            cache.pool.free_list_of(content.blocks[0])
            if content.blocks
            else cache.host_pool.free_list_of(content.host_block)
        )
        session = self._sessions.get(free_list)
        # The list may belong to another session by now, if the block has not been idle for long.
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
        """Remove the sessions that have neither requests nor KV cache blocks. New sessions can then use their free
        lists."""
        pools = self.cache.tiers.pools
        moving = {move.free_list for move in self.cache.moves}
        for session in list(self._sessions.values()):
            has_blocks = session.free_list in moving or any(pool.has_blocks(session.free_list) for pool in pools)
            if not session.num_groups and not has_blocks:
                del self._sessions[session.free_list]
                self._unused_lists.append(session.free_list)
                if session.name:
                    del self._named[session.tenant, session.name]
        self._num_kept = len(self._sessions)
