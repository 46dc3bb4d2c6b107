"""OpenTelemetry spans for the work of rows. Their parents are the spans that the row openings name.

A row has two spans. `execute prefill` lasts from the step that allocates the row to the step that computes the last of
its known tokens. `execute decode` lasts from there to the last step before the row's slot is released or the epoch
ends. A step's cost depends only on rows that are allocated, released or in prefill, so a decoding row costs nothing.
This module needs the extra `tracing`.
"""

import time
from dataclasses import dataclass

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagewire.common.wire.messages import RowOpening, StepPlan
from pagewire.common.wire.transport.otlp import tracer_provider


@dataclass(slots=True)
class _Phase:
    """The current tracing span of one running sequence: its prefill or its decoding.

    Times are in nanoseconds since 1970.
    """

    parent: context.Context
    sequence_id: int
    began_ns: int
    first_step: int
    num_tokens_left: int  # tokens left to prefill
    work: int  # tokens per step during prefill


class StepTracing:
    """A recorder of OpenTelemetry spans for the sequences of every step. The engine calls it for each step, in order.

    The calls are made on the thread that delivers the step's result.
    """

    def __init__(self, endpoint: str, *, version: str) -> None:
        """Create a recorder that sends its spans to a collector.

        `endpoint` is the collector's address, http://HOST:PORT for OTLP over gRPC.
        """
        self._provider = tracer_provider(endpoint, "pagewire-worker", version)
        self._tracer = self._provider.get_tracer("pagewire", version)
        self._propagator = TraceContextTextMapPropagator()
        self._prefilling: dict[int, _Phase] = {}  # by slot
        self._decoding: dict[int, _Phase] = {}
        self._epoch = self._last_step = self._last_ended_ns = 0

    def step_done(self, plan: StepPlan, started_ns: int) -> None:
        """Record a finished step in the tracing spans of its sequences. Call this as soon as the step has finished.

        `started_ns` is the time at which the step began, in nanoseconds since 1970. The end of the step is the time of
        the call.
        """
        if plan.epoch != self._epoch:
            self._end_all()
            self._epoch = plan.epoch
        for slot in plan.released_slots:
            self._end_row(slot)
        for opening in plan.openings:
            if opening.traceparent:
                self._prefilling[opening.slot] = self._begin(opening, plan.step, started_ns)
        ended_ns = time.time_ns()
        if self._prefilling:
            self._prefill(plan, ended_ns)
        self._last_step, self._last_ended_ns = plan.step, ended_ns

    def close(self) -> None:
        """End all tracing spans, and send the spans that are still pending if the collector accepts them in time."""
        self._end_all()
        self._provider.shutdown()

    def _begin(self, opening: RowOpening, step: int, started_ns: int) -> _Phase:
        parent = self._propagator.extract({"traceparent": opening.traceparent})
        num_tokens = len(opening.token_ids) - opening.num_computed_tokens
        return _Phase(parent, opening.sequence_id, started_ns, step, num_tokens, 0)

    def _prefill(self, plan: StepPlan, ended_ns: int) -> None:
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            if slot in self._prefilling:
                self._prefilling[slot].work = num_tokens
        for slot, phase in list(self._prefilling.items()):
            phase.num_tokens_left -= phase.work
            if phase.num_tokens_left <= 0:
                del self._prefilling[slot]
                self._end("execute prefill", phase, plan.step, ended_ns)
                self._decoding[slot] = _Phase(phase.parent, phase.sequence_id, ended_ns, plan.step + 1, 0, 0)

    def _end_row(self, slot: int) -> None:
        for name, phases in (("execute prefill", self._prefilling), ("execute decode", self._decoding)):
            phase = phases.pop(slot, None)
            # A row that ends with its first token has no decode span.
            if phase is not None and phase.first_step <= self._last_step:
                self._end(name, phase, self._last_step, self._last_ended_ns)

    def _end_all(self) -> None:
        for slot in [*self._prefilling, *self._decoding]:
            self._end_row(slot)

    def _end(self, name: str, phase: _Phase, last_step: int, ended_ns: int) -> None:
        span = self._tracer.start_span(
            name,
            context=phase.parent,
            kind=trace.SpanKind.INTERNAL,
            start_time=phase.began_ns,
            attributes={
                "pagewire.sequence_id": phase.sequence_id,
                "pagewire.epoch": self._epoch,
                "pagewire.first_step": phase.first_step,
                "pagewire.last_step": last_step,
            },
        )
        span.end(ended_ns)
