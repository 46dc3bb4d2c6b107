"""A simulated connection between the scheduler and the worker.

Messages arrive in order. When the connection breaks, only a suffix of the messages is lost.
"""

from dataclasses import dataclass, field

from pagewire.common.wire.messages import StepPlan

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Connection:
    """A connection during one epoch. Times are in seconds.

    A message that would arrive after its direction was cut is lost.
    """

    epoch: int
    last_down: float = 0.0  # when the latest message arrives at the worker
    last_up: float = 0.0
    down_cut_at: float = NEVER
    up_cut_at: float = NEVER
    plans: list[StepPlan] = field(default_factory=list)  # all plans that were sent
    last_moved_step: int = 0  # the latest step that the scheduler's side has received
    grammar_ids: set[int] = field(default_factory=set)  # grammars that the worker has or prepares
    told_grammar_ids: set[int] = field(default_factory=set)  # the scheduler knows the outcome

    def send_down(self, now: float, delay: float) -> float:
        """Return when a message arrives at the worker, or NEVER."""
        self.last_down = max(self.last_down, now + delay)
        return self.last_down if self.last_down < self.down_cut_at else NEVER

    def send_up(self, now: float, delay: float) -> float:
        """Return when a message arrives at the scheduler, or NEVER."""
        self.last_up = max(self.last_up, now + delay)
        return self.last_up if self.last_up < self.up_cut_at else NEVER

    def cut(self, now: float, fraction: float, *, down: bool, up: bool) -> None:
        """Cut one or both directions. `fraction`: the part of the time in flight up to which messages still arrive."""
        if down:
            self.down_cut_at = min(self.down_cut_at, now + fraction * max(0.0, self.last_down - now))
        if up:
            self.up_cut_at = min(self.up_cut_at, now + fraction * max(0.0, self.last_up - now))
