"""VllmEngine with authenticated callers: each caller sees only its own requests and cached content."""

import asyncio
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from testing.scheduler_stack import Stack, serve
from testing.serving.tenants import PROMPT, code_of, credentials, slow_stack
from tests.contract.vllm_client import request, stub_of


async def ends_of(stack: Stack, tenant: str, message: vllm_engine_pb2.GenerateRequest) -> list[str]:
    responses = stub_of(stack).Generate(message, metadata=credentials(tenant))
    return [response.complete.finish_reason async for response in responses if response.HasField("complete")]


async def cached_tokens_of(stack: Stack, tenant: str) -> set[int]:
    """Return the first token of each block that the tenant's events report."""
    call = stub_of(stack).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=credentials(tenant))
    batch = await call.read()
    call.cancel()
    assert batch.snapshot.count == 1
    return {block.token_ids[0] for event in batch.events for block in event.stored.blocks}


async def test_strangers_are_refused(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        stub = stub_of(stack)
        for call in (
            stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest()),
            stub.Generate(request(PROMPT, max_tokens=2)).read(),
            stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_no_tenant_aborts_anothers_request(checkpoint: Path, tenants: Path) -> None:
    async with slow_stack(checkpoint, tenants) as stack:
        stub, abort = stub_of(stack), vllm_engine_pb2.AbortRequest(request_ids=["same"])
        message = request(PROMPT, request_id="same", max_tokens=30)
        calls = [asyncio.create_task(ends_of(stack, tenant, message)) for tenant in ("acme", "globex")]
        async with asyncio.timeout(10):
            while stack.worker.num_steps < 3:  # noqa: ASYNC110 - no event reports a step
                await asyncio.sleep(0.01)
        await stub.Abort(abort, metadata=credentials("acme"))
        stack.worker.step_seconds = 0
        assert await asyncio.gather(*calls) == [["abort"], ["length"]]


async def test_each_tenant_gets_events_of_its_own_blocks(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        for first, tenant in ((100, "acme"), (200, "globex")):
            await ends_of(stack, tenant, request([first, 1, 2, 3, 4], max_tokens=1))
        assert await cached_tokens_of(stack, "acme") == {100}
        assert await cached_tokens_of(stack, "globex") == {200}
        flush = common_pb2.FlushCacheRequest()
        refused = stub_of(stack).FlushCache(flush, metadata=credentials("acme"))
        assert await code_of(refused) is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub_of(stack).FlushCache(flush, metadata=credentials("root"))).success
        assert await cached_tokens_of(stack, "globex") == set()


async def test_loads_of_other_tenants_are_not_reported(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        stub = stub_of(stack)
        await ends_of(stack, "globex", request([200, 1, 2, 3, 4], max_tokens=1))
        for tenant, code in (("acme", grpc.StatusCode.PERMISSION_DENIED), ("root", None)):
            asked = stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(), metadata=credentials(tenant))
            assert await code_of(asked) is code
            info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), metadata=credentials(tenant))
            assert info.uptime_seconds > 0
            assert (info.last_receive_timestamp > 0) == (tenant == "root")


async def test_sequence_numbers_count_only_own_events(checkpoint: Path, tenants: Path) -> None:
    """Other tenants' activity is not visible: not in sequence numbers, not as empty batches, and not
    in load reports.
    """
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        call = stub_of(stack).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=credentials("acme"))
        batches = [await call.read()]
        for first in range(100, 105):
            for _ in range(first - 100):
                await ends_of(stack, "globex", request([first + 100, 1, 2, 3, 4], max_tokens=1))
            await ends_of(stack, "acme", request([first, 1, 2, 3, 4], max_tokens=1))
            batches.append(await call.read())
        call.cancel()
        assert [batch.sequence_number - batches[0].sequence_number for batch in batches] == list(range(6))
        assert not any(batch.HasField("load") for batch in batches)
        told = [block.token_ids[0] for batch in batches for event in batch.events for block in event.stored.blocks]
        assert told == [100, 101, 102, 103, 104]
        # A cursor of an earlier subscription is unknown here.
        again = common_pb2.SubscribeKvEventsRequest(start_sequence_number=batches[2].sequence_number)
        call = stub_of(stack).SubscribeKvEvents(again, metadata=credentials("acme"))
        snapshot = await call.read()
        call.cancel()
        assert snapshot.snapshot.blocks == 5
        assert snapshot.sequence_number > batches[-1].sequence_number
