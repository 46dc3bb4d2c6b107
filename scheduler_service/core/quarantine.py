"""Which request crashes the worker? Found by running suspects in halves.

A request is charged for a crash of the worker when it was dispatched and no token of it has been confirmed since. The
first crash means nothing: workers die. Requests that were there twice are suspects: they run half by half and no other
beside them, until each has had a token confirmed. One that crashes the worker alone, twice, fails. Thus one poison
request among n costs at most 3 + log2(n) crashes, and no other fails for it (S10). A grammar that the worker
prepares may be what crashes it: that is charged to all requests that need it, as to one.
"""

from collections.abc import Iterable, Set

from scheduler_service.core.sequence import SequenceGroup

_MAX_LONE_CRASHES = 2


class Quarantine:
    """Which groups are suspects, and which of them are tried now."""

    def __init__(self) -> None:
        self.suspects: list[SequenceGroup] = []  # in order of arrival
        self._trial: set[SequenceGroup] = set()
        self.charged: set[SequenceGroup] = set()  # a confirmed token clears them

    def admits(self, request: SequenceGroup) -> bool:
        """Whether the request may run beside what runs now."""
        return not self._trial or request in self._trial

    def crashed(self, computed: Iterable[SequenceGroup], preparing: Set[SequenceGroup]) -> list[SequenceGroup]:
        """Charge the requests that were computed, and those whose grammars were prepared, when the worker was lost.
        Returns those that must fail."""
        charged = sorted({*computed, *preparing}, key=lambda request: request.order)
        causes = {request.request.grammar if request in preparing else request for request in charged}
        self.charged.update(charged)
        for request in charged:
            request.num_crashes += 1
            request.num_lone_crashes += len(causes) == 1
        failed = [request for request in charged if request.num_lone_crashes >= _MAX_LONE_CRASHES]
        # The culprit is among those that were there: one that was not is no suspect for now.
        suspects = [request for request in charged if request.num_crashes >= 2 and request not in failed]
        self.suspects = suspects or [request for request in self.suspects if request not in failed]
        self._start_trial()
        return failed

    def cleared(self, request: SequenceGroup) -> None:
        """Take back the charges: a token of the request was confirmed, or it ended."""
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
