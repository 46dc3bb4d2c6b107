"""The observers of the step loop's work: metrics, traces and the log of requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeVar

from pagewire.common.wire.messages import StepResult, WorkerCapacity
from scheduler_service.core.request import EndReason, Request, SequenceEnd

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Reasons of ends that are not failures. ABORT is not a failure: the client disconnected, or an operator aborted.
NON_FAILURES = (EndReason.STOP, EndReason.LENGTH, EndReason.ABORT)


class Observer:
    """An observer of the step loop's work, such as metrics or tracing. A subclass overrides the methods of the events
    that it needs; the other methods do nothing.

    Events occur once per request or once per step, never once per token.
    """

    def submission(self, request: Request, trace_headers: Mapping[str, str]) -> AbstractContextManager[Request]:
        """Return the context manager in which the step loop submits a request to the scheduler core. An observer may
        change the request, for example to add a span of the distributed trace in `trace_headers`; the context manager's
        value is the request to submit. If the block raises an exception, the request was refused."""
        return nullcontext(request)

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        """Called when a sample of an admitted request has ended. `now` is the time of the end in seconds of the step
        loop's clock."""

    def step_finished(self, result: StepResult, num_computed_prompt_tokens: int) -> None:
        """Called when the worker's result of a step has been processed. `num_computed_prompt_tokens` is the number of
        prompt tokens, of all sequences since the start, that were not found in the prefix cache."""

    def first_token_after(self, seconds: float) -> None:
        """Called when the first output token of a sequence was computed, `seconds` after the arrival of its request."""

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        """Called when `num_tokens` sequences have one new output token each, `seconds` after their previous token."""

    def worker_changed(self, capacity: WorkerCapacity | None) -> None:
        """Called with the properties of a worker when it has connected, and with None when the worker is lost."""

    def invariant_failed(self) -> None:
        """Called when a check has found that an invariant of the scheduler core is broken."""


class Observers:
    """The observers of the step loop, as one list of methods for each event. A list contains only the methods that an
    observer overrides, so that the other observers cost no time."""

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
