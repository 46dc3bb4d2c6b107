"""A scheduler without a worker: after `--worker-grace` it refuses requests that another server can serve from the
start.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from pagewire.cli.replay import main as replay
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Result, Stack, details, expected_tokens, request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import FrontEnd, serve_both
from tests.contract import vllm_client
from tests.contract.shared_stream import SharedStream

PROMPT = [5, 6, 7, 8, 9]
DEADLINE = 30
LENGTH = 150  # tokens, which take 1.5 s, so that no request ends before its worker
GRACE = 0.2
AWAY = f"no worker has been connected for {GRACE} s; send the request to another server"
SERVICES = ("", "pagewire.scheduler.v1.SchedulerService", "vllm.grpc.engine.VllmEngine")


async def until_health(channel: grpc.aio.Channel, *, is_ready: bool) -> None:
    """Wait until all services have the given health. Check that the process is alive all the time."""
    wanted = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
    stub = health_pb2_grpc.HealthStub(channel)
    for name in SERVICES:
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        async with asyncio.timeout(DEADLINE):
            async for answer in watch:
                if answer.status == wanted:
                    break
        watch.cancel()
    liveness = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert liveness.status == health_pb2.HealthCheckResponse.SERVING


class Call:
    """A Generate RPC that a task reads continuously."""

    def __init__(self, stub: pb_grpc.SchedulerServiceStub, message: pb.GenerateRequest) -> None:
        self.has_begun = asyncio.Event()
        self.result = Result()
        self.ended = asyncio.create_task(self._read(stub, message))

    async def _read(self, stub: pb_grpc.SchedulerServiceStub, message: pb.GenerateRequest) -> None:
        async for response in stub.Generate(message):
            self.result.add(response)
            self.has_begun.set()


@asynccontextmanager
async def serving(checkpoint: Path, **options: object) -> AsyncIterator[Stack]:
    """Start a scheduler whose worker needs 10 ms for each step."""
    async with serve(checkpoint, **({"worker_grace": GRACE, "worker_timeout": 60.0} | options)) as stack:
        stack.worker.step_seconds = 0.01
        yield stack


async def lose_worker(stack: Stack, channel: grpc.aio.Channel | None = None) -> None:
    """Stop the worker, and wait until the grace period has ended."""
    await stack.worker.kill()
    await until_health(channel or stack.channel, is_ready=False)


async def stall_with(stack: Stack, num_sequences: int) -> None:
    """Wait until the scheduler has `num_sequences` sequences. The worker must not finish any further step."""
    await stack.until(lambda loads: loads.num_running + loads.num_waiting == num_sequences)


async def assert_sent_away(call: asyncio.Task[object]) -> None:
    ended = await failure_of(asyncio.wait_for(call, DEADLINE))
    assert (ended.code(), ended.details()) == (grpc.StatusCode.UNAVAILABLE, AWAY)
    assert details(ended)[1].retry_delay.seconds == 2


async def test_requests_without_a_token_and_new_ones_are_sent_away(checkpoint: Path) -> None:
    async with serving(checkpoint) as stack:
        begun = Call(stack.stub, request(PROMPT, max_tokens=LENGTH))
        await begun.has_begun.wait()
        stack.worker.step_seconds = 3600
        accepted = [Call(stack.stub, request([i, *PROMPT])) for i in range(3)]
        await stall_with(stack, 4)
        await lose_worker(stack)
        for call in accepted:
            await assert_sent_away(call.ended)
            assert not call.result.responses
        await assert_sent_away(asyncio.create_task(stack.generate(request(PROMPT))))
        info = await stack.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.unavailable_reason == AWAY
        stack.worker.step_seconds = 0.0
        await stack.worker.start()
        await until_health(stack.channel, is_ready=True)
        assert (await stack.generate(request(PROMPT, max_tokens=3))).token_ids[0] == expected_tokens(PROMPT, 3)
        await begun.ended
        assert begun.result.token_ids[0] == expected_tokens(PROMPT, LENGTH)
        await stack.until_idle()


async def test_before_the_grace_has_ended_requests_wait(checkpoint: Path) -> None:
    async with serving(checkpoint, worker_grace=60.0) as stack:
        stack.worker.step_seconds = 3600
        accepted = Call(stack.stub, request(PROMPT, max_tokens=5))
        await stall_with(stack, 1)
        await stack.worker.kill()
        await stack.until(lambda loads: not loads.worker_connected)
        queued = Call(stack.stub, request([1, *PROMPT], max_tokens=5))
        await stall_with(stack, 2)
        await until_health(stack.channel, is_ready=True)
        stack.worker.step_seconds = 0.0
        await stack.worker.start()
        for call in (accepted, queued):
            await asyncio.wait_for(call.ended, DEADLINE)


async def submit(stack: Stack, name: str, prompt: list[int]) -> None:
    message = request(prompt, max_tokens=LENGTH)
    message.request_id = name
    await stack.stub.Submit(pb.SubmitRequest(request=message))


async def attach(stub: pb_grpc.SchedulerServiceStub, name: str) -> list[int]:
    responses = stub.Attach(pb.AttachRequest(request_id=name))
    return [token async for response in responses for token in response.token_ids]


async def test_detached_requests_wait_on_and_are_taken(checkpoint: Path) -> None:
    async with serving(checkpoint) as stack:
        await submit(stack, "begun", PROMPT)
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        stack.worker.step_seconds = 3600
        await submit(stack, "queued", [1, *PROMPT])
        readers = [asyncio.create_task(attach(stack.stub, name)) for name in ("begun", "queued")]
        await lose_worker(stack)
        await submit(stack, "new", [2, *PROMPT])
        readers.append(asyncio.create_task(attach(stack.stub, "new")))
        assert (await stack.loads()).num_waiting == 3
        stack.worker.step_seconds = 0.0
        await stack.worker.start()
        for prompt, reader in zip(([], [1], [2]), readers, strict=True):
            assert await asyncio.wait_for(reader, DEADLINE) == expected_tokens([*prompt, *PROMPT], LENGTH)


async def test_many_requests_on_one_call(checkpoint: Path) -> None:
    async with serving(checkpoint) as stack:
        shared = SharedStream(stack)
        (plain,) = await shared.submit(request(PROMPT, max_tokens=LENGTH), token_only=True)
        (whole,) = await shared.submit(request([1, *PROMPT], max_tokens=LENGTH), token_only=True, read_whole=True)
        await stack.until(lambda loads: loads.num_generation_tokens > 8)
        stack.worker.step_seconds = 3600
        (queued,) = await shared.submit(request([2, *PROMPT]))
        await stall_with(stack, 3)
        await lose_worker(stack)
        (new,) = await shared.submit(request([3, *PROMPT]))
        async with asyncio.timeout(DEADLINE):
            for stream in (whole, queued, new):
                await stream.ended.wait()
                failure = stream.failure
                assert (failure.code, failure.message) == (grpc.StatusCode.UNAVAILABLE.value[0], AWAY)
                assert failure.retry_delay_seconds == 2
            while (await shared.infos.get()).unavailable_reason != AWAY:
                pass
            assert not plain.ended.is_set()
            stack.worker.step_seconds = 0.0
            await stack.worker.start()
            await plain.ended.wait()
            while (await shared.infos.get()).unavailable_reason:
                pass
        assert plain.token_ids == expected_tokens(PROMPT, LENGTH)
        await shared.close()


async def vllm_health(end: Stack | FrontEnd) -> tuple[bool, str]:
    health = await vllm_client.stub_of(end).HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    return health.healthy, health.message


@pytest.mark.parametrize("has_front_end", [False, True], ids=["scheduler", "front end"])
async def test_routers_are_told_to_go_elsewhere(checkpoint: Path, has_front_end: bool) -> None:
    """Routers get UNAVAILABLE for requests that another server can serve from the start, which includes whole
    responses.

    A front end behaves like the scheduler.
    """
    async with serve_both(checkpoint, worker_grace=GRACE) as (stack, front):
        end = front if has_front_end else stack
        stack.worker.step_seconds = 0.01
        messages = {stream: vllm_client.request(PROMPT, stream=stream, max_tokens=LENGTH) for stream in (False, True)}
        whole = asyncio.create_task(vllm_client.generate(end, messages[False]))
        streamed = asyncio.create_task(vllm_client.generate(end, messages[True]))
        await stack.until(lambda loads: loads.num_generation_tokens > 8)
        stack.worker.step_seconds = 3600
        queued = asyncio.create_task(vllm_client.generate(end, vllm_client.request([1, *PROMPT], stream=True)))
        await stall_with(stack, 3)
        await lose_worker(stack, end.channel)
        for call in (whole, queued, asyncio.create_task(vllm_client.generate(end, messages[True]))):
            await assert_sent_away(call)
        assert await vllm_health(end) == (False, AWAY)
        assert not streamed.done()
        stack.worker.step_seconds = 0.0
        await stack.worker.start()
        await until_health(end.channel, is_ready=True)
        assert await vllm_health(end) == (True, "serving")
        output = await asyncio.wait_for(streamed, DEADLINE)
        assert list(output.complete.output_ids) == expected_tokens(PROMPT, LENGTH)


async def test_what_waits_on_ends_with_the_workers_timeout(checkpoint: Path) -> None:
    async with serving(checkpoint, worker_grace=0.0, worker_timeout=0.5) as stack:
        streamed = Call(stack.stub, request(PROMPT))
        await submit(stack, "detached", [1, *PROMPT])
        await streamed.has_begun.wait()
        await stack.worker.kill()
        ended = await failure_of(asyncio.wait_for(streamed.ended, DEADLINE), grpc.StatusCode.UNAVAILABLE)
        assert ended.details() == "no worker has been connected for 0.5 s; try again later"
        with pytest.raises(grpc.aio.AioRpcError, match=r"connected for 0\.5 s"):
            await attach(stack.stub, "detached")
        with pytest.raises(grpc.aio.AioRpcError, match=r"connected for 0\.5 s"):
            await submit(stack, "new", PROMPT)


async def test_a_worker_that_has_not_come_yet_is_missing_too(checkpoint: Path) -> None:
    """A starting scheduler also waits for the grace period. A detached request waits until the worker's limits are
    known.
    """
    worker = FakeWorker(read_model_info(str(checkpoint)).digest)
    worker.port, port = free_port("127.0.0.1"), free_port("127.0.0.1")
    options = {"model": str(checkpoint), "port": port, "metrics_port": 0, "worker_grace": GRACE}
    config = SchedulerConfig(**options, worker=f"127.0.0.1:{worker.port}")
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(server.run(config, stop=stop, ready=lambda url: ready.set()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.SchedulerServiceStub(channel)
        await channel.channel_ready()
        message = request(PROMPT, max_tokens=4)
        submitted = stub.Submit(pb.SubmitRequest(request=message))
        await assert_sent_away(Call(stub, message).ended)
        await assert_sent_away(Call(stub, message).ended)
        caught = await failure_of(
            vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(vllm_engine_pb2.HealthCheckRequest()),
            grpc.StatusCode.UNAVAILABLE,
        )
        assert caught.details().startswith(f"{AWAY} (loading: ")
        assert not submitted.done()
        await worker.start()
        await asyncio.wait_for(ready.wait(), DEADLINE)
        assert await attach(stub, (await submitted).request_id) == expected_tokens(PROMPT, 4)
        stop.set()
        assert await running == 0
    await worker.kill()


async def test_the_grace_is_recorded_and_replayed(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    async with serving(checkpoint, record=str(path)) as stack:
        begun = Call(stack.stub, request(PROMPT, max_tokens=LENGTH))
        await begun.has_begun.wait()
        stack.worker.step_seconds = 3600
        queued = Call(stack.stub, request([1, *PROMPT]))
        await stall_with(stack, 2)
        await lose_worker(stack)
        await assert_sent_away(queued.ended)
        stack.worker.step_seconds = 0.0
        await stack.worker.start()
        await begun.ended
    assert '"worker_grace_ended"' in path.read_text()
    assert replay([str(path)]) == 0, capsys.readouterr().out


def test_it_is_at_most_the_workers_timeout() -> None:
    for options in ({"worker_grace": 5.0, "worker_timeout": 4.0}, {"worker_grace": 120.5}):
        with pytest.raises(ValueError, match=r"--worker-grace is .*, but must be at most --worker-timeout, which is"):
            SchedulerConfig(model="somewhere", **options).validate()
    for options in ({"worker_grace": 120.0}, {"worker_grace": 0.0}, {"worker_timeout": 1.0}):
        SchedulerConfig(model="somewhere", **options).validate()
