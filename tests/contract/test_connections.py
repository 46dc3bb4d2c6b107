"""At the connection limit of a service, existing connections and the service's own work continue."""

import asyncio
import contextlib
import os
import resource
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from pagewire.common.process.limits import raise_descriptor_limit
from pagewire.common.wire.transport import listening
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import request, serve
from tests.contract.service_process import Process, service

NUM_DESCRIPTORS = 128
MAX_CONNECTIONS = NUM_DESCRIPTORS // 2
PROMPT = [1, 2, 3, 4, 5]
OK = grpc.StatusCode.OK


# Runs a process with a low limit of open files.
LIMITED = ("sh", "-c", f'ulimit -n {NUM_DESCRIPTORS} && exec "$@"', "sh")


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[scheduler_pb2_grpc.SchedulerServiceStub]:
    """Open a separate connection, and yield a stub."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)


async def code_of_call(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> grpc.StatusCode:
    return await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).code()


async def generate(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
    call = stub.Generate(request(PROMPT, max_tokens=3), wait_for_ready=True, timeout=60)
    assert sum([len(response.token_ids) async for response in call]) == 3


def num_descriptors(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@contextlib.asynccontextmanager
async def crowded(process: Process, address: str) -> AsyncIterator[None]:
    """Open as many connections as the service accepts, and keep them open."""
    async with contextlib.AsyncExitStack() as crowd:
        num_connected = 0
        while (code := await code_of_call(await crowd.enter_async_context(connection(address)))) is OK:
            num_connected += 1
        assert code is grpc.StatusCode.UNAVAILABLE
        assert num_connected == MAX_CONNECTIONS - 1
        assert num_descriptors(process) < NUM_DESCRIPTORS
        yield


async def check_silence_is_no_harm(address: str) -> None:
    """Check that the server eventually closes connections on which nothing is sent."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(120):
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * NUM_DESCRIPTORS)]
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()


async def test_a_scheduler_under_a_crowd(checkpoint: Path) -> None:
    worker = await FakeWorker.started(checkpoint)
    metrics_port = free_port("127.0.0.1")
    flags = [f"--worker=127.0.0.1:{worker.port}", "--port=0", f"--metrics-port={metrics_port}"]

    def get_metrics() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60) as response:
            return response.read()

    async with (
        service("scheduler", str(checkpoint), *flags, launcher=LIMITED) as (process, address),
        connection(address) as first,
    ):
        await generate(first)
        async with crowded(process, address):
            await worker.kill()
            await worker.start()
            await generate(first)
            assert len(worker.epochs) == 2
            assert b"pagewire:epochs_total" in await asyncio.to_thread(get_metrics)
        async with connection(address) as later:
            await generate(later)
        await check_silence_is_no_harm(address)
        await generate(first)
    await worker.kill()


async def test_a_front_end_under_a_crowd(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        flags = [f"--scheduler={stack.url.removeprefix('grpc://')}", "--port=0"]
        async with (
            service("frontend", str(checkpoint), *flags, launcher=LIMITED) as (process, address),
            connection(address) as first,
        ):
            await generate(first)
            async with crowded(process, address):
                await generate(first)
            async with connection(address) as later:
                await generate(later)


def test_the_open_file_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (1024, 4096)

    def setrlimit(kind: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        assert kind == resource.RLIMIT_NOFILE
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    unlimited = resource.RLIM_INFINITY
    for before, after, num_connections in (
        ((1024, 4096), (4096, 4096), 3840),
        ((1024, 1048576), (65536, 1048576), 65280),
        ((1024, unlimited), (65536, unlimited), 65280),
        ((200_000, 200_000), (200_000, 200_000), 65536),
        ((unlimited, unlimited), (unlimited, unlimited), 65536),
        ((100, 100), (100, 100), 50),
        ((1, 1), (1, 1), 1),
    ):
        limits = before
        raise_descriptor_limit()
        assert limits == after
        assert listening.max_open_connections() == num_connections


def test_a_limit_that_may_not_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: int, wanted: tuple[int, int]) -> None:
        raise PermissionError("denied")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", denied)
    raise_descriptor_limit()
