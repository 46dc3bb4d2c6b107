"""One trace through both services: the scheduler and the worker continue a router's trace."""

import asyncio
from pathlib import Path

import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from testing.checkpoints.families import make_checkpoint
from testing.services import System
from testing.trace_collector import attributes, collecting

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_the_workers_spans_are_children_of_the_schedulers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", seed=3)
    async with collecting() as (collector, endpoint):
        flags = ["--otlp-traces-endpoint", endpoint]
        system = System(model, worker=flags, scheduler=[*flags, "--served-model-name", "tiny"])
        try:
            async with grpc.aio.insecure_channel(system.url) as channel:
                sampling = {"max_tokens": 5, "ignore_eos": True}
                message = pb.GenerateRequest(token_ids={"ids": [1, 2, 3]}, sampling=sampling)
                metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)
                async for _ in pb_grpc.SchedulerServiceStub(channel).Generate(message, metadata=metadata):
                    pass
        finally:
            await asyncio.to_thread(system.stop)  # on the collector's loop; the services export spans as they end
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    (root,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert root.parent_span_id.hex() == PARENT_ID
    children = [span for span in collector.spans if span is not root]
    assert {span.parent_span_id for span in children} == {root.span_id}
    names = sorted(span.name for span in children)
    assert names == ["decode", "execute decode", "execute prefill", "prefill", "queue"]
    assert len({attributes(span)["pagewire.sequence_id"] for span in children}) == 1
    assert {"pagewire-scheduler", "pagewire-worker"} <= set(collector.resources)
