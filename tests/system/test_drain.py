"""SIGTERM: the statuses that clients receive, the work that continues, the time until exit, and leftover processes."""

import asyncio
import random
import signal
import socket
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire import AsyncClient
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.forked import running
from testing.services import HOST, Service
from testing.serving.failures import code_at_end
from testing.streams import requests_of, run_streams, run_while_ending

pytestmark = pytest.mark.alone

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"
VOCAB_SIZE = 1000
NUM_RESTARTS = 3
NUM_STREAMS = 16
# The longest time, in seconds, that a scheduler may need after its drain timeout.
MAX_OVERRUN = 2.0


def can_bind(address: str) -> bool:
    """Return whether no server listens at the address; closed connections may linger."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            return False
        return True


async def test_rolling_restarts_of_the_worker_under_load_lose_nothing() -> None:
    requests = requests_of(11, VOCAB_SIZE)[:NUM_STREAMS]
    with running(STORYTELLER, worker=["--dtype", "float32"], scheduler=["--drain-timeout", "20"]) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_streams(client, requests)
            runs, _ = await run_while_ending(system, client, requests, [0] * NUM_RESTARTS, run_streams, kills=False)
            loads = await client.loads()
    assert all(served == calm for served in runs)
    assert loads.num_worker_losses == NUM_RESTARTS
    assert loads.num_held_blocks == 0


@pytest.mark.parametrize("drain_timeout", [0.5, 20])
async def test_a_scheduler_is_gone_in_time_whichever_listens(drain_timeout: float) -> None:
    """One stream is longer or shorter than the drain timeout, and a subscription never ends by itself."""
    flags = ["--drain-timeout", drain_timeout]
    with running(STORYTELLER, scheduler=flags) as system:
        async with grpc.aio.insecure_channel(system.url) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            events = stub.SubscribeKvEvents(scheduler_pb2.SubscribeKvEventsRequest())
            reading = asyncio.create_task(code_at_end(events))
            message = scheduler_pb2.GenerateRequest(text="Once upon a time")
            message.sampling.max_tokens = 400 if drain_timeout < 1 else 20
            message.sampling.ignore_eos = True
            message.sampling.n = 4
            stream = stub.Generate(message)
            await stream.read()
            finishing = asyncio.create_task(code_at_end(stream))
            if drain_timeout < 1:
                # The stream cannot end by itself, however fast this machine is.
                system.worker.send_signal(signal.SIGSTOP)
            told_at = time.monotonic()
            system.scheduler.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(system.scheduler.stop) == 0
            seconds = time.monotonic() - told_at
            assert await finishing is (grpc.StatusCode.UNAVAILABLE if drain_timeout < 1 else grpc.StatusCode.OK)
            assert await reading is grpc.StatusCode.UNAVAILABLE
        print(f"drain timeout {drain_timeout} s: gone after {seconds:.2f} s")
        assert seconds <= min(drain_timeout, 10) + MAX_OVERRUN
        assert can_bind(system.url)


async def until_live(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="liveness")
        await health.Check(request, wait_for_ready=True, timeout=30)


@pytest.mark.parametrize("attempt", range(4))
async def test_a_worker_that_loads_ends_well(attempt: int) -> None:
    """The worker listens before it imports torch. It is stopped at some moment between listening and being ready."""
    delay = 0.0 if attempt == 0 else random.Random(attempt).uniform(0, 2.5)
    print(f"told after {delay:.2f} s")
    port = free_port(HOST)
    worker = Service("worker", ["--model", STORYTELLER, "--port", port])
    await until_live(f"127.0.0.1:{port}")
    await asyncio.sleep(delay)  # the progress of loading cannot be observed
    assert await asyncio.to_thread(worker.stop) == 0
    assert can_bind(f"127.0.0.1:{port}")


async def test_a_scheduler_without_a_worker_ends_at_once() -> None:
    port = free_port(HOST)
    flags = ["--model", STORYTELLER, "--port", port, "--metrics-port", 0, "--worker", "127.0.0.1:1"]
    scheduler = Service("scheduler", flags)
    await until_live(f"127.0.0.1:{port}")
    told_at = time.monotonic()
    assert await asyncio.to_thread(scheduler.stop) == 0
    assert time.monotonic() - told_at < MAX_OVERRUN
    assert can_bind(f"127.0.0.1:{port}")
