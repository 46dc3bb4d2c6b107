"""Eviction that knows the trace, as a bound for what can be learned."""

from collections.abc import Callable

from scheduler_service.core.retention import Expectation, Session
from scheduler_service.simulation.trace import Trace, TraceRequest

_NEVER = -1e18


class Belady(Expectation):
    """Loses those sessions' blocks first that return last, after Belady, "A Study of Replacement Algorithms for a
    Virtual-Storage Computer", 1966. Sessions are named as in the trace.

    It knows when a session's next request comes, not how long that will wait.
    """

    def __init__(self, trace: Trace, think_s: Callable[[TraceRequest], float]) -> None:
        self._sessions = {session.name: session for session in trace.sessions}
        self._think_s = think_s
        self._last_index: dict[str, int] = {}

    def began(self, name: str, index: int) -> None:
        """A session has sent its request of this index."""
        self._last_index[name] = index

    def last_needed_at(self, session: Session) -> float:
        requests, index = self._sessions[session.name].requests, self._last_index[session.name]
        if index + 1 >= len(requests):
            return _NEVER
        return -(session.last_used_at + self._think_s(requests[index + 1]))
