"""A collector of the spans that services export over OTLP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.resources: list[str] = []

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            self.resources += [value.value.string_value for value in resource.resource.attributes]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector until the context ends. Yield it with its endpoint."""
    collector, collecting_server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, collecting_server)
    port = collecting_server.add_insecure_port("127.0.0.1:0")
    await collecting_server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await collecting_server.stop(0)


def attributes(span: trace_pb2.Span) -> dict[str, object]:
    values = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        values[entry.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values
