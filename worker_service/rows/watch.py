"""Times what the host does for a step."""

import time

from pagewire.common.messages import StepParts


class StepWatch:
    """Times the parts of a step one after the other, from the moment it is made."""

    def __init__(self) -> None:
        self.began_ns = self._last_ns = self._taken_ns = time.perf_counter_ns()
        self._ns: dict[str, int] = {}

    def end(self, part: str, known: dict[str, int] | None = None) -> None:
        """Books the time since the last call to a part, but what is `known` to have gone to others."""
        now = time.perf_counter_ns()
        inside = known or {}
        for name, ns in {part: now - self._last_ns - sum(inside.values()), **inside}.items():
            self._ns[name] = self._ns.get(name, 0) + ns
        self._last_ns = now

    def take(self) -> tuple[int, StepParts]:
        """Microseconds that were booked since this was called last, in all and by part."""
        duration_us, self._taken_ns = (self._last_ns - self._taken_ns) // 1000, self._last_ns
        parts = StepParts(**{f"{name}_us": max(0, ns // 1000) for name, ns in self._ns.items()})
        self._ns.clear()
        return duration_us, parts
