"""The worker's side of the protocol as a state machine: epochs, plan order, pipeline depth. No I/O and no torch.

An epoch is one pairing with one scheduler. Epochs rise strictly, so the scheduler with the highest epoch owns the
worker, and a replaced scheduler is refused for good. An epoch is a Unix time in milliseconds, shifted left by 20 bits.
The worker refuses epochs more than a day in the future. Otherwise a single hello with the highest possible epoch would
make the worker unusable for all schedulers.
"""

from collections import deque
from dataclasses import dataclass, field

from pagewire.common.wire.messages import PROTOCOL_VERSION, Hello, Refusal, RefusalReason, WorkerProtocolError

_EPOCH_SHIFT = 20
_MAX_LEAD_S = 24 * 3600.0  # by which a scheduler's clock may be ahead


@dataclass(slots=True)
class Session:
    """The protocol state of one session with a scheduler, identified by its epoch number.

    Plans arrive in step order, and at most `pipeline_depth` plans are unfinished at the same time.
    """

    epoch: int
    instance_id: str
    pipeline_depth: int
    max_leased_steps: int = 0
    last_planned_step: int = 0
    last_answered_step: int = 0
    _last_steps: deque[int] = field(default_factory=deque)  # of the unfinished plans, with their leases

    @property
    def num_unfinished(self) -> int:
        """The number of plans whose last result has not been sent."""
        return len(self._last_steps)

    def plan(self, epoch: int, step: int, num_leased_steps: int = 0) -> None:
        """Record that the plan of a step has arrived from the scheduler.

        Raises WorkerProtocolError if the plan is not the next plan of this session, if its lease is too long, or if
        `pipeline_depth` earlier plans are unfinished.
        """
        if epoch != self.epoch:
            raise WorkerProtocolError(f"a plan is of epoch {epoch}, this session is epoch {self.epoch}")
        if step != self.last_planned_step + 1:
            raise WorkerProtocolError(f"a plan is step {step}, the next step is {self.last_planned_step + 1}")
        if num_leased_steps > self.max_leased_steps:
            raise WorkerProtocolError(
                f"step {step} leases {num_leased_steps} steps; this worker accepts {self.max_leased_steps}"
            )
        if self.num_unfinished >= self.pipeline_depth:
            raise WorkerProtocolError(
                f"step {step} arrived while {self.num_unfinished} plans are unfinished; the pipeline depth is "
                f"{self.pipeline_depth}"
            )
        self.last_planned_step = step + num_leased_steps
        self._last_steps.append(self.last_planned_step)

    def answer(self, step: int, num_dropped_steps: int = 0) -> int:
        """Record that the worker is about to send the result of `step`, which must be the oldest unfinished step, and
        does not compute the `num_dropped_steps` steps after it.

        Return how many results of the same lease follow, if it does not end early.
        """
        assert step == self.last_answered_step + 1 <= self.last_planned_step
        self.last_answered_step = step + num_dropped_steps
        num_later = self._last_steps[0] - self.last_answered_step
        if not num_later:
            self._last_steps.popleft()
        return num_later


@dataclass(slots=True)
class SessionRegister:
    """The highest epoch number that this worker has accepted, and the scheduler instance that sent it.

    It decides whether a scheduler may begin a session.
    """

    last_epoch: int = 0
    instance_id: str = ""

    def hello(self, hello: Hello, now: float) -> Session | Refusal:
        """Decide by the first message of a scheduler whether to begin a session. Return the session or the refusal.

        `now` is the current time in seconds of Unix time. Raises WorkerProtocolError if `pipeline_depth` is 0 or
        `instance_id` is empty.
        """
        if hello.protocol_version != PROTOCOL_VERSION:
            message = f"this worker speaks protocol version {PROTOCOL_VERSION}, not {hello.protocol_version}"
            return Refusal(RefusalReason.PROTOCOL_VERSION, self.last_epoch, self.instance_id, message)
        if hello.pipeline_depth < 1:
            raise WorkerProtocolError("pipeline_depth is 0; it must be at least 1")
        if not hello.instance_id:
            raise WorkerProtocolError("instance_id is empty; a scheduler must name itself")
        if hello.epoch >> _EPOCH_SHIFT > int((now + _MAX_LEAD_S) * 1000):
            message = f"epoch {hello.epoch} is more than a day ahead of this worker's clock; set the clocks of both"
            return Refusal(RefusalReason.FUTURE_EPOCH, self.last_epoch, self.instance_id, message)
        if hello.epoch <= self.last_epoch:
            message = f"epoch {hello.epoch} is not above {self.last_epoch}, held by instance {self.instance_id!r}"
            return Refusal(RefusalReason.STALE_EPOCH, self.last_epoch, self.instance_id, message)
        self.last_epoch = hello.epoch
        self.instance_id = hello.instance_id
        return Session(hello.epoch, hello.instance_id, hello.pipeline_depth)
