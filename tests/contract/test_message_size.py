"""A message above a port's size limit gets the same error for every method, service and client."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import pagewire
from pagewire.common.wire.transport.listening import create_server
from pagewire.common.wire.transport.message_size import MARGIN_BYTES, MAX_MESSAGE_BYTES, too_large
from testing.scheduler_stack import expected_tokens, request, serve
from testing.serving.failures import code_at_end
from tests.contract.shared_stream import SharedStream

PROMPT = [1, 2, 3, 4, 5]


async def answer(
    channel: grpc.aio.Channel, method: str, data: bytes, compression: grpc.Compression | None = None
) -> tuple[grpc.StatusCode, str]:
    """Send `data` as the message of an RPC. Return the status code and details."""
    call = channel.stream_stream(method)(iter([data]), compression=compression)
    return await code_at_end(call), await call.details()


async def methods_of(channel: grpc.aio.Channel) -> list[str]:
    """Return all methods of a port, as its reflection service lists them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**query: str) -> reflection_pb2.ServerReflectionResponse:
        (found,) = [
            each async for each in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**query)]))
        ]
        return found

    names = [each.name for each in (await ask(list_services="")).list_services_response.service]
    pool = DescriptorPool()
    for name in names:
        files = (await ask(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto
        for serialized in reversed(files):
            pool.AddSerializedFile(serialized)
    return [f"/{name}/{method.name}" for name in names for method in pool.FindServiceByName(name).methods]


async def test_every_method_gives_the_same_answer(checkpoint: Path) -> None:
    size = MAX_MESSAGE_BYTES + 1
    expected = grpc.StatusCode.INVALID_ARGUMENT, too_large(size, MAX_MESSAGE_BYTES)
    async with serve(checkpoint) as stack:
        methods = await methods_of(stack.channel)
        services = {method.split("/")[1] for method in methods}
        assert {
            "pagewire.scheduler.v1.SchedulerService",
            "vllm.grpc.engine.VllmEngine",
            "grpc.health.v1.Health",
        } <= services
        for method in methods:
            assert await answer(stack.channel, method, bytes(size)) == expected, method
        packed = await answer(stack.channel, methods[0], bytes(size), grpc.Compression.Gzip)
        assert packed == expected


async def test_messages_at_and_far_above_the_limit(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, pagewire.AsyncClient(stack.url) as client:
        method, headroom = "/pagewire.scheduler.v1.SchedulerService/Generate", MAX_MESSAGE_BYTES + MARGIN_BYTES
        code, details = await answer(stack.channel, method, bytes(MAX_MESSAGE_BYTES))
        assert (code, "not a message of this method" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        code, details = await answer(stack.channel, method, bytes(headroom))
        assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, too_large(headroom, MAX_MESSAGE_BYTES))
        code, _ = await answer(stack.channel, method, bytes(64 << 20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "gRPC's own answer, before the message is in memory"
        for size in (2 << 20, 5 << 20, 64 << 20):
            with pytest.raises(pagewire.InvalidRequest, match="shorten it") as caught:
                await client.complete("x" * size)
            assert (f"accepts at most {MAX_MESSAGE_BYTES} in a message" in str(caught.value)) == (
                size > MAX_MESSAGE_BYTES
            )


async def test_a_too_large_submission_ends_only_its_rpc(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        other, shared = SharedStream(stack), SharedStream(stack, reads=False)
        (stream,) = await other.submit(request(PROMPT, max_tokens=200))
        await shared.submit(request("x" * (5 << 20)))
        with pytest.raises(grpc.aio.AioRpcError, match=f"accepts at most {MAX_MESSAGE_BYTES} in a message") as caught:
            await shared.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await stream.ended.wait()
        assert stream.token_ids == expected_tokens(PROMPT, 200)


async def test_a_port_has_the_limit_that_it_is_given() -> None:
    server = create_server(max_message_bytes=10)

    async def length(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return str(len(data)).encode()

    handlers = {"Length": grpc.unary_unary_rpc_method_handler(length, bytes, bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/test.Service/Length")(bytes(10)) == b"10"
        assert await answer(channel, "/test.Service/Length", bytes(11)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            too_large(11, 10),
        )
    await server.stop(0)
