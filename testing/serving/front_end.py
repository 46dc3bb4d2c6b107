"""A front end that is connected to the scheduler of a stack, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.hosting.supervisor import free_port
from pagewire.options import Resolved
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service import front_end
from scheduler_service.api.grpc.request_servicer import SERVICE_NAME
from scheduler_service.config import FrontEndConfig
from testing.scheduler_stack import Result, Stack, serve

DEADLINE = 30


@dataclass
class FrontEnd:
    """A running front end with a gRPC channel to it."""

    url: str
    stub: pb_grpc.SchedulerServiceStub
    channel: grpc.aio.Channel
    stop: asyncio.Event
    running: asyncio.Task[int]

    async def generate(self, message: pb.GenerateRequest, **call: float) -> Result:
        result = Result()
        async for response in self.stub.Generate(message, **call):
            result.add(response)
        return result

    async def until_ready(self, wanted: bool = True) -> None:
        expected = health_pb2.HealthCheckResponse.SERVING if wanted else health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        async with asyncio.timeout(DEADLINE):
            async for answer in watch:
                if answer.status == expected:
                    watch.cancel()
                    return


@asynccontextmanager
async def serve_front_end(
    checkpoint: Path, scheduler: str, *, waits: bool = True, **options: str | int
) -> AsyncIterator[FrontEnd]:
    address, port = scheduler.removeprefix("grpc://"), free_port("127.0.0.1")
    given: dict[str, Any] = {"model": str(checkpoint), "scheduler": address, "port": port, "metrics_port": 0} | options
    config: FrontEndConfig = Resolved(given, {}).build(FrontEndConfig)
    stop, stop_now = asyncio.Event(), asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(front_end.run(config, stop=stop, ready=url.set_result, stop_now=stop_now))
    if waits:
        await asyncio.wait({running, url}, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        assert url.done(), f"the front end did not become ready: {running}"
    address = f"127.0.0.1:{config.port}"
    channel = grpc.aio.insecure_channel(address)
    try:
        yield FrontEnd(address, pb_grpc.SchedulerServiceStub(channel), channel, stop, running)
    finally:
        stop.set()
        stop_now.set()
        await running
        await channel.close()


@asynccontextmanager
async def serve_both(checkpoint: Path, **options: object) -> AsyncIterator[tuple[Stack, FrontEnd]]:
    async with serve(checkpoint, **options) as stack, serve_front_end(checkpoint, stack.url) as front:
        yield stack, front
