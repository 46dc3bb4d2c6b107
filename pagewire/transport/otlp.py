"""Spans of OpenTelemetry on their way to a collector, over OTLP. This module needs the extra `tracing`."""

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_EXPORT_TIMEOUT = 1.0  # seconds: a collector that is not there must not delay the end of the process


def tracer_provider(endpoint: str, service_name: str, version: str) -> TracerProvider:
    """Make a provider of tracers, which sends a service's spans to the collector at `endpoint`, http://HOST:PORT."""
    provider = TracerProvider(resource=Resource.create({"service.name": service_name, "service.version": version}))
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_TIMEOUT)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
