"""The quarantine: finds the request that crashes the worker, by running the suspects in halves.

A request is charged for a crash of the worker if it was dispatched and no token of it has been confirmed since. A first
crash has no consequence, because a worker may die for other reasons. Requests charged twice are suspects. They run half
by half, with no other request beside them, until each has had a token confirmed. A request that crashes the worker
alone, twice, fails. So one bad request among n costs at most 3 + log2(n) crashes, and no other request fails because of
it (S10).

A grammar that the worker prepares may also cause the crash. Such a crash is charged to all requests that need the
grammar, as if they were one request.
"""

from collections.abc import Iterable, Set

from scheduler_service.core.sequence import SequenceGroup

_MAX_LONE_CRASHES = 2


class Quarantine:
    """The search for the request that crashes the worker. A request becomes a suspect if the worker was working on it
    during two crashes.

    In a trial, some of the suspects run without any other request, until each has produced a token or the worker
    crashes.
    """

    def __init__(self) -> None:
        self.suspects: list[SequenceGroup] = []  # in order of arrival
        self._trial: set[SequenceGroup] = set()
        self.charged: set[SequenceGroup] = set()  # charged until a token is confirmed

    def admits(self, request: SequenceGroup) -> bool:
        """Return whether a request may run now. During a trial, only the suspects of this trial may run, so that a
        crash of the worker can be attributed to them."""
        return not self._trial or request in self._trial

    def crashed(self, computed: Iterable[SequenceGroup], preparing: Set[SequenceGroup]) -> list[SequenceGroup]:
        """Record a crash of the worker against each request that the worker was computing or whose grammar it was
        preparing.

        Return the requests that must fail, because the worker has crashed twice while it worked on nothing but this
        request or its grammar.
        """
        charged = sorted({*computed, *preparing}, key=lambda request: request.order)
        causes = {request.request.grammar if request in preparing else request for request in charged}
        self.charged.update(charged)
        for request in charged:
            request.num_crashes += 1
            request.num_lone_crashes += len(causes) == 1
        failed = [request for request in charged if request.num_lone_crashes >= _MAX_LONE_CRASHES]
        # The cause is among the charged requests. A request that was not charged is no suspect for now.
        suspects = [request for request in charged if request.num_crashes >= 2 and request not in failed]
        self.suspects = suspects or [request for request in self.suspects if request not in failed]
        self._start_trial()
        return failed

    def cleared(self, request: SequenceGroup) -> None:
        """Remove the suspicion from a request: delete the crashes recorded against it. Call this when the worker has
        computed one of its tokens, or when the request has ended."""
        if request not in self.charged:
            return
        self.charged.remove(request)
        request.num_crashes = request.num_lone_crashes = 0
        if request in self.suspects:
            self.suspects.remove(request)
            self._trial.discard(request)
            if not self._trial:
                self._start_trial()

    def _start_trial(self) -> None:
        self._trial = set(self.suspects[: max(1, len(self.suspects) // 2)])
