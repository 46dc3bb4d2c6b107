"""Every gRPC port under a flood of calls that are reset at once: memory stays bounded, and other calls are answered."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.hosting.supervisor import free_port
from testing import rapid_resets
from testing.forked import running
from testing.services import HOST, Service

pytestmark = pytest.mark.alone

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
MAX_GROWTH = 200 << 20
NUM_CALLS_AT_ONCE = 5_000
# Without bounds, each call uses more than 6 KiB as long as it waits for the event loop.
NUM_RESETS = 60_000
TIMEOUT_S = 60
PORTS = ("scheduler", "scheduler health", "front end", "front end health", "worker", "worker health")


@dataclass(frozen=True)
class Port:
    address: str
    service: Service
    calm_bytes: int  # of the service, before any flood

    @property
    def growth(self) -> int:
        """The service's peak memory in bytes, minus its memory before any flood."""
        return self.service.peak_bytes - self.calm_bytes


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, Port]]:
    """The ports of a scheduler, a front end and a worker, and the ports for their probes."""
    probed = {name: free_port(HOST) for name in ("scheduler", "front end", "worker")}
    worker = ["--num-device-blocks", 64, "--health-port", probed["worker"]]
    with running(STORYTELLER, worker=worker, scheduler=["--health-port", probed["scheduler"]]) as system:
        flags = ["--scheduler", system.url, "--port", 0, "--health-port", probed["front end"], "--log-level", "error"]
        front_end = Service("frontend", [STORYTELLER, *flags])
        try:
            services = {"scheduler": system.scheduler, "front end": front_end, "worker": system.worker}
            addresses = {
                "scheduler": system.url,
                "front end": front_end.wait_until_ready(),
                "worker": system.worker_address,
            }
            addresses |= {f"{name} health": f"{HOST}:{port}" for name, port in probed.items()}
            calm = {name: service.resident_bytes for name, service in services.items()}
            owners = {name: name.removesuffix(" health") for name in PORTS}
            yield {name: Port(addresses[name], services[owner], calm[owner]) for name, owner in owners.items()}
        finally:
            front_end.kill()


@contextlib.asynccontextmanager
async def health(port: Port) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """Yield a health stub on a separate connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(port.address, options=options) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def is_answered(stub: health_pb2_grpc.HealthStub) -> bool:
    """Return whether a call is answered, rather than refused because too many calls wait."""
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if (error.code(), error.details()) != (grpc.StatusCode.CANCELLED, "CANCELLED"):
            raise
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def until_answered(stub: health_pb2_grpc.HealthStub) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_answered(stub):  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "num_connections"),
    # A port for probes accepts 16 connections, including the honest one and open ones of an earlier flood.
    [(name, number) for name in PORTS for number in (2, 10 if name.endswith("health") else 16)],
)
async def test_a_flood_of_resets(ports: dict[str, Port], name: str, num_connections: int) -> None:
    port = ports[name]
    async with health(port) as stub:
        await until_answered(stub)
        port.service.forget_peak()
        arguments = ("-m", "testing.rapid_resets", port.address, rapid_resets.CHECK)
        flood = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, str(num_connections), str(NUM_RESETS), stdout=asyncio.subprocess.PIPE
        )
        ended = asyncio.create_task(flood.communicate())
        num_answered = 0
        while not ended.done():
            await until_answered(stub)
            num_answered += 1
        await until_answered(stub)
    print(f"{name}: {port.growth / 2**20:.0f} MiB, {num_answered} calls answered meanwhile")
    assert flood.returncode == 0
    assert int((await ended)[0]) >= NUM_RESETS - num_connections, "the server has closed connections"
    assert port.growth < MAX_GROWTH


@pytest.mark.parametrize("name", PORTS)
async def test_many_calls_at_once_are_all_answered(ports: dict[str, Port], name: str) -> None:
    async with health(ports[name]) as stub:
        assert all(await asyncio.gather(*(is_answered(stub) for _ in range(NUM_CALLS_AT_ONCE))))
