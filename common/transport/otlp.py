"""Spans of OpenTelemetry on their way to a collector, over OTLP. This module needs the extra `tracing`."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pagewire.common.transport.http_proxy import http_proxy_of

_EXPORT_TIMEOUT = 1.0  # seconds: a collector that is not there must not delay the end of the process


class _Operations:
    """Stands where OpenTelemetry 1.45 counts an exporter's failures, which it keeps in a cycle with all their spans."""

    @contextmanager
    def export_operation(self, num_spans: int) -> Iterator[SimpleNamespace]:
        result = SimpleNamespace(error=None, error_attrs=None)
        yield result
        result.error = None  # it holds the frame that holds the result


def tracer_provider(endpoint: str, service_name: str, version: str) -> TracerProvider:
    """Make a provider of tracers, which sends a service's spans to the collector at `endpoint`, http://HOST:PORT.

    Raises ValueError for variables of OpenTelemetry that it cannot be made with, of which each has errors of its own.
    """
    # It tells a line again after 20 s, but at once where the warning that a batch is tried again came in between.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").setLevel(logging.ERROR)
    try:
        return _provider(endpoint, service_name, version)
    except Exception as error:
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        cause = f" with {variables}" if variables else ""
        raise ValueError(f"OpenTelemetry cannot be set up{cause}: {error}") from error


def _provider(endpoint: str, service_name: str, version: str) -> TracerProvider:
    provider = TracerProvider(resource=Resource.create({"service.name": service_name, "service.version": version}))
    # Its annotation knows options with texts alone; gRPC takes numbers.
    options: Any = (("grpc.enable_http_proxy", int(http_proxy_of(urlsplit(endpoint).netloc) is not None)),)
    exporter = OTLPSpanExporter(
        endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT, channel_options=options
    )
    exporter._metrics = _Operations()  # type: ignore[assignment]
    # Half of OpenTelemetry's own numbers: a span that waits is a dozen objects, which every full collection looks at.
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1024, max_export_batch_size=256))
    return provider
