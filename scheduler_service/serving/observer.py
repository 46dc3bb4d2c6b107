"""The observers of the step loop's work: metrics, traces and the log of requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeVar

from pagewire.common.wire.messages import StepResult, WorkerCapacity
from scheduler_service.core.request import EndReason, Request, SequenceEnd

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

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

    def step_finished(self, result: StepResult, num_computed_prompt_tokens: int) -> None:
        """A step's result has been taken in. The prompt tokens are those of all sequences so far that the cache did
        not have."""

    def first_token_after(self, seconds: float) -> None:
        """A sequence got its first token this long after its request had arrived."""

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` sequences got a token this long after the one before."""

    def worker_changed(self, capacity: WorkerCapacity | None) -> None:
        """A worker joined, or (None) was lost."""

    def invariant_failed(self) -> None:
        """An invariant of the scheduler was found broken."""


class Observers:
    """The methods to call for each event: those of the observers that override it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.submission = _overriding(Observer.submission, observers)
        self.sequence_ended = _overriding(Observer.sequence_ended, observers)
        self.step_finished = _overriding(Observer.step_finished, observers)
        self.first_token_after = _overriding(Observer.first_token_after, observers)
        self.tokens_after = _overriding(Observer.tokens_after, observers)
        self.worker_changed = _overriding(Observer.worker_changed, observers)
        self.invariant_failed = _overriding(Observer.invariant_failed, observers)


def _overriding(
    event: Callable[Concatenate[Observer, _Arguments], _Result], observers: Sequence[Observer]
) -> list[Callable[_Arguments, _Result]]:
    name = event.__name__
    return [getattr(observer, name) for observer in observers if getattr(type(observer), name) is not event]
