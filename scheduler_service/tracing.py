"""OpenTelemetry spans of requests, under the conventional names `gen_ai.*`.

A request is one span, a child of the caller's span if the caller sent one. Its child spans are the phases of its
samples: `queue` until the first run, `prefill` until the first token, `decode` until the end, and `preempted` for each
time without a row on the worker. The spans are created when a sample ends, from times that are recorded anyway, so that
a step has no additional cost. The span's context is sent to the worker with the request's rows. This module needs the
extra `tracing`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pagewire.common.wire.messages import Pooling
from pagewire.common.wire.sampling_rules import COMMON_FILTERS, FILTERS_OFF
from pagewire.common.wire.transport.otlp import tracer_provider
from scheduler_service.core.request import Request, SequenceEnd
from scheduler_service.serving.observer import NON_FAILURES, Observer


@dataclass(slots=True)
class _OpenRequest:
    span: trace.Span
    num_open: int  # unfinished samples
    # The wall-clock time at which `time.monotonic` was 0. Computed for each request, since the wall clock may be
    # adjusted.
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by sequence
    num_output_tokens: int = 0

    def nanoseconds(self, moment: float) -> int:
        """Convert a time of `time.monotonic` in seconds to Unix time in nanoseconds, which OpenTelemetry uses."""
        return self.epoch_ns + int(moment * 1e9)


class Tracing(Observer):
    """An observer of the step loop that creates the OpenTelemetry spans of requests. All times are seconds of
    `time.monotonic`."""

    def __init__(self, endpoint: str, *, model_name: str, version: str) -> None:
        """Prepare to create spans and to send them to an OpenTelemetry collector. `endpoint` is the collector's
        address, http://HOST:PORT for OTLP over gRPC. `model_name` is an attribute of the spans."""
        self._provider = tracer_provider(endpoint, "pagewire-scheduler", version)
        self._tracer = self._provider.get_tracer("pagewire", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._requests: dict[tuple[str, str], _OpenRequest] = {}

    @contextmanager
    def submission(self, request: Request, trace_headers: Mapping[str, str]) -> Iterator[Request]:
        """A context manager for the block that submits a request to the scheduler core. It starts the request's span,
        and its value is the request with the context of this span. If the block raises an exception, the request was
        refused and has no span."""
        span = self._tracer.start_span(
            f"{_operation(request)} {self._model_name}",
            context=self._propagator.extract(trace_headers),
            kind=trace.SpanKind.SERVER,
            attributes=self._attributes_of(request),
        )
        headers: dict[str, str] = {}
        self._propagator.inject(headers, trace.set_span_in_context(span))
        yield replace(request, traceparent=headers.get("traceparent", ""))
        self._requests[request.tenant, request.request_id] = _OpenRequest(span, request.n)

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        key = (request.tenant, request.request_id)
        opened = self._requests[key]
        self._add_phases(opened, end, now)
        opened.finish_reasons[end.sequence_id] = end.reason.value
        opened.num_output_tokens += end.num_output_tokens
        if end.reason not in NON_FAILURES:
            opened.span.set_attribute("error.type", end.reason.value)
            opened.span.set_status(trace.StatusCode.ERROR, end.message)
        opened.num_open -= 1
        if not opened.num_open:
            del self._requests[key]
            reasons = [reason for _, reason in sorted(opened.finish_reasons.items())]
            opened.span.set_attribute("gen_ai.response.finish_reasons", reasons)
            opened.span.set_attribute("gen_ai.usage.input_tokens", end.num_prompt_tokens)
            opened.span.set_attribute("gen_ai.usage.cache_read.input_tokens", end.num_cached_tokens)
            opened.span.set_attribute("gen_ai.usage.output_tokens", opened.num_output_tokens)
            opened.span.end(opened.nanoseconds(now))

    def close(self) -> None:
        """Send the remaining spans to the collector. Spans that the collector does not accept are lost."""
        self._provider.shutdown()

    def _attributes_of(self, request: Request) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _operation(request),
            "gen_ai.provider.name": "pagewire",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_tokens,
            **{
                f"gen_ai.request.{name}": value
                for name in COMMON_FILTERS  # an integer is omitted if it is off
                if (value := getattr(request.sampling, name)) or isinstance(FILTERS_OFF[name], float)
            },
            "pagewire.tenant": request.tenant,
        }
        if request.n > 1:
            attributes["gen_ai.request.choice.count"] = request.n
        if request.grammar is not None:
            attributes["pagewire.grammar"] = request.grammar.kind.name.lower()
        return attributes

    def _add_phases(self, opened: _OpenRequest, end: SequenceEnd, now: float) -> None:
        moments = [end.arrived_at, end.first_scheduled_at, end.first_token_at, now]
        for name, (begin, finish) in zip(("queue", "prefill", "decode"), pairwise(moments), strict=True):
            if begin is None:
                break
            self._add_phase(opened, name, begin, now if finish is None else finish, end.sequence_id)
        for begin, finish in zip_longest(end.pauses[::2], end.pauses[1::2], fillvalue=now):
            self._add_phase(opened, "preempted", begin, finish, end.sequence_id)

    def _add_phase(self, opened: _OpenRequest, name: str, begin: float, finish: float, sequence_id: int) -> None:
        child = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(opened.span),
            start_time=opened.nanoseconds(begin),
            attributes={"pagewire.sequence_id": sequence_id},
        )
        child.end(opened.nanoseconds(finish))


def _operation(request: Request) -> str:
    return "text_completion" if request.sampling.pooling is Pooling.NONE else "embeddings"
