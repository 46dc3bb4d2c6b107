"""Export of OpenTelemetry spans to a collector over OTLP. This module needs the extra `tracing`."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from pagewire.common.wire.transport.http_proxy import http_proxy_of

logger = logging.getLogger(__name__)

# The loggers with which OpenTelemetry reports every 20 s that a collector is unreachable, and that its queue is full.
_EXPORTING = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
_QUEUEING = logging.getLogger("opentelemetry.sdk._shared_internal")
_EXPORT_TIMEOUT = 1.0  # seconds; an unreachable collector must not delay the end of the process


class _Operations:
    """A replacement for the failure metrics of the exporter in OpenTelemetry 1.45. The original metrics keep the spans
    of a failed export alive in a reference cycle.
    """

    @contextmanager
    def export_operation(self, num_spans: int) -> Iterator[SimpleNamespace]:
        result = SimpleNamespace(error=None, error_attrs=None)
        yield result
        result.error = None  # the error's frames refer to the result: a cycle that only a full collection would free


class _Exporter(OTLPSpanExporter):
    """An exporter of OpenTelemetry spans that logs once when the collector stops accepting spans, and once when it
    accepts spans again.
    """

    def __init__(self, endpoint: str, **options: Any) -> None:
        super().__init__(endpoint, **options)
        self._is_out = False
        self._metrics = _Operations()  # type: ignore[assignment]
        _EXPORTING.setLevel(logging.ERROR)  # each failed attempt of a batch is a warning
        _QUEUEING.setLevel(logging.NOTSET)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if self._is_out == (result is SpanExportResult.SUCCESS):
            self._is_out = not self._is_out
            _EXPORTING.setLevel(logging.CRITICAL if self._is_out else logging.ERROR)
            _QUEUEING.setLevel(logging.CRITICAL if self._is_out else logging.NOTSET)
            if not self._is_out:
                logger.info("the span collector accepts spans again")
        return result


def tracer_provider(endpoint: str, service_name: str, version: str) -> TracerProvider:
    """Return an OpenTelemetry tracer provider that sends a service's spans to the collector at `endpoint`,
    http://HOST:PORT.

    Raises ValueError if OpenTelemetry cannot be set up with the OTEL_ variables of the environment. OpenTelemetry
    itself raises a different type of error for each variable.
    """
    try:
        return _provider(endpoint, service_name, version)
    except Exception as error:
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        cause = f" with {variables}" if variables else ""
        raise ValueError(f"OpenTelemetry cannot be set up{cause}: {error}") from error


def _provider(endpoint: str, service_name: str, version: str) -> TracerProvider:
    provider = TracerProvider(resource=Resource.create({"service.name": service_name, "service.version": version}))
    # The annotation allows only text values, but gRPC accepts numbers.
    options: Any = (("grpc.enable_http_proxy", int(http_proxy_of(urlsplit(endpoint).netloc) is not None)),)
    exporter = _Exporter(
        endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT, channel_options=options
    )
    # Half of OpenTelemetry's defaults: each queued span has a dozen objects, which every full garbage collection
    # visits.
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1024, max_export_batch_size=256))
    return provider
