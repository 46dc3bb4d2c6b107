"""Tenants of a front end: the front end authenticates callers like the scheduler, and the scheduler enforces quotas."""

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from pagewire.common.process.child_process import EXIT_REFUSED
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service import front_end
from scheduler_service.config import FrontEndConfig
from testing.scheduler_stack import request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_front_end
from testing.serving.tenants import (
    KEYS,
    PROMPT,
    code_of,
    credentials,
    generate,
    read_to_end,
    remove_tenant,
    serve_tenants,
    write_tenants,
)


def as_tenant(tenant: str, **sampling: object) -> pb.GenerateRequest:
    message = request(PROMPT, **({"max_tokens": 2} | sampling))
    message.tenant = tenant
    return message


async def test_who_opens_the_scheduler_s_socket_is_an_operator(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    socket = str(tmp_path / "scheduler")
    async with (
        serve(checkpoint, tenants=str(tenants), socket=socket) as stack,
        serve_front_end(checkpoint, f"unix:{socket}", tenants=str(tenants)) as front,
        grpc.aio.insecure_channel(f"unix:{socket}") as channel,
    ):
        assert len((await generate(front, as_tenant(""), "acme")).token_ids[0]) == 2
        stub, empty = pb_grpc.SchedulerServiceStub(channel), pb.GetBlocksRequest()
        await stub.GetBlocks(empty)
        # A key takes precedence over the socket. The TCP port accepts no RPC without a key.
        acme = stub.GetBlocks(empty, metadata=credentials("acme"))
        assert await code_of(acme) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(stack.stub.GetBlocks(empty)) is grpc.StatusCode.UNAUTHENTICATED


async def test_only_tenants_are_served_and_each_as_itself(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    async with serve_tenants(checkpoint, tmp_path, tenants) as (_, front):
        for metadata in (None, (("authorization", "Bearer unknown"),)):
            call = front.stub.Generate(as_tenant(""), metadata=metadata)
            assert await code_of(call.read()) is grpc.StatusCode.UNAUTHENTICATED
        assert len((await generate(front, as_tenant(""), "acme")).token_ids[0]) == 2
        assert await code_of(generate(front, as_tenant("globex"), "acme")) is grpc.StatusCode.PERMISSION_DENIED
        # Its prompt is cached for acme only, whichever server the other tenants use.
        for tenant, num_cached in (("globex", 0), ("acme", 36)):
            result = await generate(front, as_tenant(""), tenant)
            assert result.last[0].usage.cached_tokens == num_cached


async def test_quotas_are_those_of_the_scheduler(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    write_tenants(tenants, acme={"max_requests": 1})
    async with serve_tenants(checkpoint, tmp_path, tenants) as (stack, front):
        stack.worker.step_seconds = 0.02
        running = front.stub.Generate(as_tenant("", max_tokens=200), metadata=credentials("acme"))
        await running.read()
        straight = stack.stub.Generate(as_tenant(""), metadata=credentials("acme"))
        for refused in (generate(front, as_tenant(""), "acme"), straight.read()):
            assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await code_of(generate(front, as_tenant(""), "globex")) is None
        running.cancel()


async def test_a_tenant_that_only_the_front_end_knows_is_refused(
    checkpoint: Path, tenants: Path, tmp_path: Path
) -> None:
    """A tenant that only the front end knows is refused.

    This happens for a short time while only one of the two services has read that the tenant was revoked.
    """
    newer = tmp_path / "newer.yaml"
    write_tenants(newer)
    write_tenants(tenants)
    text = newer.read_text()
    newer.write_text(text.replace("acme:", "other:"))
    async with serve_tenants(checkpoint, tmp_path, newer, tenants) as (_, front):
        with pytest.raises(
            grpc.aio.AioRpcError, match="'acme' is not known to the scheduler; the front end's --tenants"
        ) as error:
            await generate(front, as_tenant(""), "acme")
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(generate(front, as_tenant(""), "globex")) is None


async def test_revoked_tenants_lose_their_streams(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    async with serve_tenants(checkpoint, tmp_path, tenants) as (stack, front):
        stack.worker.step_seconds = 0.02
        stream = front.stub.Generate(as_tenant("", max_tokens=200), metadata=credentials("acme"))
        await stream.read()
        write_tenants(tenants, acme={"api_keys": []})
        async with asyncio.timeout(10):
            while await code_of(stream.read()) is None:
                pass
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_streams_end_of_a_tenant_that_the_front_ends_own_file_still_has(
    checkpoint: Path, tenants: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.yaml"
    write_tenants(own)
    async with serve_tenants(checkpoint, tmp_path, tenants, own) as (stack, front):
        stack.worker.step_seconds = 0.05
        streams = {
            name: front.stub.Generate(as_tenant("", max_tokens=200), metadata=credentials(name))
            for name in ("acme", "globex")
        }
        for stream in streams.values():
            await stream.read()
        remove_tenant(tenants, "acme")
        assert await code_of(read_to_end(streams["acme"])) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(streams["globex"].read()) is None
        streams["globex"].cancel()


@pytest.mark.parametrize(
    ("own", "key", "reason"),
    [
        (False, KEYS["root"].encode(), "it has API keys; start this front end with the same --tenants or --api-key"),
        (True, None, "UNAUTHENTICATED"),
    ],
    ids=["without tenants", "without a key"],
)
async def test_a_front_end_that_would_remove_tenancy_serves_no_request(
    checkpoint: Path, tenants: Path, tmp_path: Path, own: bool, key: bytes | None, reason: str
) -> None:
    options = {"tenants": str(tenants)} if own else {}
    if key is not None:
        (tmp_path / "key").write_bytes(key)
        options["scheduler_api_key_file"] = str(tmp_path / "key")
    async with (
        serve(checkpoint, tenants=str(tenants)) as stack,
        serve_front_end(checkpoint, stack.url, waits=False, **options) as front,
    ):
        metadata = credentials("acme") if own else None
        async with asyncio.timeout(20):
            while True:
                call = front.stub.Generate(as_tenant("acme"), metadata=metadata, wait_for_ready=True)
                error = await failure_of(call.read(), grpc.StatusCode.UNAVAILABLE)
                if reason in (error.details() or ""):
                    break


@pytest.mark.parametrize("key", [b"\xff\xfe", KEYS["root"].encode() + b"\nanother", b"\n"])
async def test_a_front_end_with_a_file_that_holds_no_key_does_not_start(
    checkpoint: Path, tmp_path: Path, key: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_bytes(key)
    options = {"scheduler": "127.0.0.1:1", "port": 0, "scheduler_api_key_file": str(tmp_path / "key")}
    config = FrontEndConfig(model=str(checkpoint), **options)
    assert await front_end.run(config, stop=asyncio.Event(), ready=print) == EXIT_REFUSED
    assert (
        caplog.messages[-1]
        == f"--scheduler-api-key-file is {tmp_path}/key, which contains no key: one line of ASCII text"
    )


async def test_only_operators_forward_tenants(
    checkpoint: Path, tenants: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with serve_tenants(checkpoint, tmp_path, tenants, operator="globex") as (_, front):
        assert await code_of(generate(front, as_tenant(""), "acme")) is grpc.StatusCode.PERMISSION_DENIED
    assert not caplog.records
