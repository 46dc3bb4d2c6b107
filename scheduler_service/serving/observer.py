"""The observers of the step loop's work: metrics, traces and the log of requests."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from pagewire.common.wire.messages import StepResult, WorkerCapacity
from scheduler_service.core.request import EndReason, KvEventCounts, Request, SchedulerStats, SequenceEnd

# Ends that are no failure of the request: a client that left, or an operator that stops, is none.
ENDED_WELL = (EndReason.STOP, EndReason.LENGTH, EndReason.ABORT)


class Observer:
    """An observer overrides the events that it wants to hear of; the others do nothing.

    Events come once per request or per step, never per token.
    """

    def submission(self, request: Request, trace_headers: Mapping[str, str]) -> AbstractContextManager[Request]:
        """The context in which a request is taken; an error in it is the refusal. It gives the request, to which a
        span may have been added of the trace that these headers tell."""
        return nullcontext(request)

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        """A sample of a request that was taken has ended."""

    def step_finished(self, result: StepResult, stats: SchedulerStats) -> None:
        """A step's result has been taken in."""

    def first_token_after(self, seconds: float) -> None:
        """A sequence got its first token this long after its request had arrived."""

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` sequences got a token this long after the one before."""

    def worker_changed(self, capacity: WorkerCapacity | None) -> None:
        """A worker joined, or (None) was lost."""

    def kv_events_happened(self, counts: KvEventCounts) -> None:
        """So many changes of the prefix cache were taken from the core."""

    def invariant_failed(self) -> None:
        """An invariant of the scheduler was found broken."""
