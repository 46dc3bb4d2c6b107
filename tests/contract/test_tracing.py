"""Spans that a collector receives over OTLP: their parents, times and attributes."""

import asyncio
import itertools
import logging
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk import trace as sdk

from pagewire.common.wire.transport.otlp import tracer_provider
from scheduler_service.config import SchedulerConfig
from testing.scheduler_stack import make_checkpoint, request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_both
from testing.trace_collector import Collector, attributes, collecting

PROMPT = [1, 2, 3, 4, 5]
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_request_is_a_child_of_its_callers_span(checkpoint: Path) -> None:
    began = time.time_ns()
    async with collecting() as (collector, endpoint):
        async with serve(checkpoint, otlp_traces_endpoint=endpoint, served_model_name="tiny") as stack:
            message = request(PROMPT, max_tokens=4, n=2, temperature=0.5, top_k=7)
            message.request_id = "mine"
            metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
            async for _ in stack.stub.Generate(message, metadata=metadata):
                pass
        ended = time.time_ns()
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    (root,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert root.parent_span_id.hex() == PARENT_ID
    assert root.kind == trace_pb2.Span.SPAN_KIND_SERVER
    found = attributes(root)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagewire",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 8,
    }
    assert expected.items() <= found.items()
    assert {name for name in found if name.startswith("gen_ai.request.")} <= expected.keys()
    assert "error.type" not in found
    assert "pagewire-scheduler" in collector.resources
    phases = [span for span in collector.spans if span is not root]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    for sequence_id in {attributes(span)["pagewire.sequence_id"] for span in phases}:
        own = [span for span in phases if attributes(span)["pagewire.sequence_id"] == sequence_id]
        assert [span.name for span in own] == ["queue", "prefill", "decode"]
        for before, after in pairwise(own):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in own)
        assert began <= own[0].start_time_unix_nano
        assert own[-1].end_time_unix_nano <= root.end_time_unix_nano <= ended
    assert len(phases) == 6
    assert set(stack.worker.traceparents) == {f"00-{TRACE_ID}-{root.span_id.hex()}-01"}


async def test_a_span_names_the_kind_of_its_grammar(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "with_end", eos_token_id=0)
    async with collecting() as (collector, endpoint), serve(path, otlp_traces_endpoint=endpoint) as stack:
        for sampling in ({"json_schema": "{}"}, {}):
            await stack.generate(request(PROMPT, max_tokens=4, temperature=0, **sampling))
    roots = [attributes(span) for span in collector.spans if span.name.startswith("text_completion")]
    assert [found.get("pagewire.grammar") for found in roots] == ["json_schema", None]
    assert all(found["gen_ai.request.temperature"] == 0 and "gen_ai.request.top_k" not in found for found in roots)


async def test_failed_and_left_requests_say_so_and_strangers_begin_a_trace(checkpoint: Path) -> None:
    async with (
        collecting() as (collector, endpoint),
        serve(checkpoint, otlp_traces_endpoint=endpoint, drain_timeout=0.0) as stack,
    ):
        stack.worker.step_seconds = 0.02
        left = stack.stub.Generate(request(PROMPT, max_tokens=200))
        await left.read()
        left.cancel()
        await stack.until_idle()
        cut = stack.stub.Generate(request(PROMPT, max_tokens=200))
        await cut.read()
        stack.stop.set()
        await stack.running
    roots = [span for span in collector.spans if span.name.startswith("text_completion")]
    assert all(not span.parent_span_id for span in roots)
    assert len({span.trace_id for span in roots}) == 2
    assert [attributes(span).get("error.type") for span in roots] == [None, "no_worker"]
    assert attributes(roots[0])["gen_ai.response.finish_reasons"] == ["abort"]
    assert roots[1].status.code == trace_pb2.Status.STATUS_CODE_ERROR


async def test_a_request_that_lost_its_worker_was_preempted(checkpoint: Path) -> None:
    async with collecting() as (collector, endpoint):
        async with serve(checkpoint, otlp_traces_endpoint=endpoint, served_model_name="tiny") as stack:
            stack.worker.step_seconds = 0.01
            call = stack.stub.Generate(request(PROMPT, max_tokens=60))
            await call.read()
            await stack.worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            await stack.worker.start()
            while await call.read() is not grpc.aio.EOF:
                pass
        spans = {span.name: span for span in collector.spans}
        assert set(spans) == {"text_completion tiny", "queue", "prefill", "decode", "preempted"}
        preempted, decode = spans["preempted"], spans["decode"]
        assert decode.start_time_unix_nano < preempted.start_time_unix_nano
        assert preempted.start_time_unix_nano < preempted.end_time_unix_nano < decode.end_time_unix_nano


async def test_a_request_that_is_refused_leaves_no_span_and_no_other_one_without_its_own(checkpoint: Path) -> None:
    message = request(PROMPT, max_tokens=30)
    message.request_id = "mine"
    async with (
        collecting() as (collector, endpoint),
        serve(checkpoint, otlp_traces_endpoint=endpoint, served_model_name="tiny") as stack,
    ):
        stack.worker.step_seconds = 0.01
        call = stack.stub.Generate(message)
        await call.read()
        await failure_of(stack.generate(message), grpc.StatusCode.ALREADY_EXISTS)
        while await call.read() is not grpc.aio.EOF:
            pass
    (root,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert {span.parent_span_id for span in collector.spans if span is not root} == {root.span_id}


async def test_a_trace_goes_through_a_front_end(checkpoint: Path) -> None:
    message = request(PROMPT, max_tokens=2)
    metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
    async with (
        collecting() as (collector, endpoint),
        serve_both(checkpoint, otlp_traces_endpoint=endpoint, served_model_name="tiny") as (_, front),
    ):
        async for _ in front.stub.Generate(message, metadata=metadata):
            pass
        async for _ in front.stub.Generate(message):
            pass
    roots = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert [span.parent_span_id.hex() for span in roots] == [PARENT_ID, ""]
    assert roots[0].trace_id.hex() == TRACE_ID != roots[1].trace_id.hex()


async def test_without_tracing_nothing_is_told_to_the_worker(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
        async for _ in stack.stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata):
            pass
    assert stack.worker.traceparents == [""]


async def test_a_missing_collector_fails_nothing(checkpoint: Path) -> None:
    async with serve(checkpoint, otlp_traces_endpoint="http://127.0.0.1:1") as stack:
        await stack.generate(request(PROMPT, max_tokens=3))
        stack.stop.set()
        assert await stack.running == 0


async def test_a_silent_collector_is_given_a_second(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that does not answer gets one second at shutdown: the deadline of the export RPC."""
    seconds: list[float] = []

    async def wait(self: Collector, message: object, context: grpc.aio.ServicerContext) -> None:
        seconds.append(context.time_remaining())
        await asyncio.Event().wait()

    monkeypatch.setattr(Collector, "Export", wait)
    async with collecting() as (_, endpoint), serve(checkpoint, otlp_traces_endpoint=endpoint) as stack:
        await stack.generate(request(PROMPT, max_tokens=3))
        stack.stop.set()
        assert await stack.running == 0
    assert [math.ceil(each - 0.1) for each in seconds] == [1]


async def test_spans_reach_a_collector_of_this_machine_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with collecting() as (collector, endpoint):
        provider = tracer_provider(endpoint, "service", "0")
        provider.get_tracer("test").start_span("a span").end()
        assert await asyncio.to_thread(provider.force_flush)
        await asyncio.to_thread(provider.shutdown)
        assert [span.name for span in collector.spans] == ["a span"]


def test_an_unavailable_collector_is_not_logged_for_each_attempt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 0.05)  # each batch is tried several times
    now = time.time() + 3600  # an hour after the lines of other tests; the clock stands still, so the 20 s never end
    monkeypatch.setattr(time, "time", lambda: now)
    provider = tracer_provider("http://127.0.0.1:1", "service", "0")
    for _ in range(2):
        provider.get_tracer("test").start_span("a span").end()
        provider.force_flush()
    provider.shutdown()
    assert [record.levelname for record in caplog.records if "export" in record.name] == ["ERROR"]


async def test_a_collector_that_refuses_is_one_line_until_it_takes_spans(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now, hours, num_calls, take = time.time(), itertools.count(1), itertools.count(), Collector.Export
    monkeypatch.setattr(time, "time", lambda: now + 3600 * next(hours))  # the previous line is always long ago

    async def refuse_at_first(self: Collector, message: Any, context: grpc.aio.ServicerContext) -> Any:
        if next(num_calls) not in (3, 5):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        return await take(self, message, context)

    monkeypatch.setattr(Collector, "Export", refuse_at_first)
    async with collecting() as (_, endpoint):
        provider = tracer_provider(endpoint, "service", "0")
        is_full_told = []  # whether warnings about a full span queue are logged
        for _ in range(6):
            provider.get_tracer("test").start_span("a span").end()
            await asyncio.to_thread(provider.force_flush)
            is_full_told.append(logging.getLogger("opentelemetry.sdk._shared_internal").isEnabledFor(logging.WARNING))
        await asyncio.to_thread(provider.shutdown)
    lines = [record for record in caplog.records if "export" in record.name or "otlp" in record.name]
    assert [record.levelname for record in lines] == ["ERROR", "INFO", "ERROR", "INFO"]
    assert is_full_told == [False, False, False, True, False, True]


async def test_a_span_stands_in_its_request_though_the_clock_was_set(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    async with collecting() as (collector, endpoint), serve(checkpoint, otlp_traces_endpoint=endpoint) as stack:
        for module in (time, sdk):
            monkeypatch.setattr(module, "time_ns", lambda: real() - 3600 * 10**9)
        await stack.generate(request(PROMPT, max_tokens=3))
        monkeypatch.undo()
    (root,) = [span for span in collector.spans if not span.parent_span_id]
    for span in collector.spans:
        assert abs(span.start_time_unix_nano - root.start_time_unix_nano) < 60 * 10**9
        assert abs(span.end_time_unix_nano - root.start_time_unix_nano) < 60 * 10**9


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_a_bad_variable_of_opentelemetry_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "bogus")
    with pytest.raises(ValueError, match=f"^OpenTelemetry cannot be set up with .*{name}"):
        tracer_provider("http://127.0.0.1:1", "service", "0")


@pytest.mark.parametrize(
    "endpoint", ["http://collector:4317", "https://127.0.0.1:1/", "http://[fe80::1%eth0]:4317", "http://c"]
)
def test_a_good_endpoint_is_taken(endpoint: str) -> None:
    SchedulerConfig(model="x", otlp_traces_endpoint=endpoint).validate()


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4317",
        "ftp://x",
        "http://",
        "http://[::1",
        "http://:4317",
        "http://c:port",
        "http://::1:1",
        "http://c:99999",
        "http://c?x",
    ],
)
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
        SchedulerConfig(model="x", otlp_traces_endpoint=endpoint).validate()
