"""VllmEngine at a front end: its answers equal the scheduler's, except RPCs that only the scheduler supports."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated import common_pb2

from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_both, serve_front_end
from tests.contract.vllm_client import generate, request, stub_of

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "message",
    [
        request(PROMPT, max_tokens=12),
        request(PROMPT, stream=True, max_tokens=12, n=3),
        request("once upon", stream=True, max_tokens=200, stop=["a"]),
        request(PROMPT, max_tokens=9, logprobs=3, prompt_logprobs=2),
    ],
    ids=str,
)
async def test_outputs_are_the_schedulers(checkpoint: Path, message: vllm_engine_pb2.GenerateRequest) -> None:
    async with serve_both(checkpoint) as (stack, front):
        direct = await generate(stack, message)
        await stack.until_idle()
        through = await generate(front, message)
        assert through.completes.keys() == direct.completes.keys()
        for index, expected in direct.completes.items():
            expected.cached_tokens = through.completes[index].cached_tokens  # the second request has a prefix cache hit
            assert through.completes[index] == expected
        await stack.until_idle()


async def test_what_it_says_of_itself_is_what_the_scheduler_says(checkpoint: Path) -> None:
    async with serve_both(checkpoint, served_model_name="tiny") as (stack, front):
        theirs, ours = stub_of(stack), stub_of(front)
        assert (await ours.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
        health = health_pb2_grpc.HealthStub(front.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        question = vllm_engine_pb2.GetModelInfoRequest()
        assert await ours.GetModelInfo(question) == await theirs.GetModelInfo(question)
        infos = [await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest()) for stub in (ours, theirs)]
        for field in ("server_type", "max_num_seqs", "block_size", "attention_backend", "model_dtype"):
            assert getattr(infos[0], field) == getattr(infos[1], field)
        archives = [
            [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())] for stub in (ours, theirs)
        ]
        assert [chunk.sha256 for chunk in archives[0]] == [chunk.sha256 for chunk in archives[1]]


async def test_its_load_is_the_schedulers_now(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.02
        call = stub_of(stack).Generate(request(PROMPT, stream=True, max_tokens=240, n=2))
        await call.read()
        question = vllm_engine_pb2.GetLoadsRequest()
        answers = await asyncio.gather(*(stub_of(front).GetLoads(question) for _ in range(5)))
        for answer in answers:
            (load,) = answer.loads
            assert (load.num_running_reqs, load.num_waiting_reqs) == (2, 0)
            assert load.num_used_tokens > 0
            assert 0 < load.token_usage <= 1
        call.cancel()
        await stack.until_idle()
        assert (await stub_of(front).GetLoads(question)).loads[0].num_running_reqs == 0


async def test_abort_ends_requests_of_every_api(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, one), serve_front_end(checkpoint, stack.url) as two:
        stack.worker.step_seconds = 0.02
        abort = vllm_engine_pb2.AbortRequest(request_ids=["another", "mine"])
        for door, other in ((one, two), (stack, one), (one, stack), (one, one)):
            running = stub_of(door).Generate(request(PROMPT, request_id="mine", max_tokens=240))
            await stack.until(lambda loads: loads.num_running == 1)
            await stub_of(other).Abort(abort)
            last = await running.read()
            assert last.complete.finish_reason == "abort"
            await stack.until_idle()


async def test_the_cache_is_the_schedulers_alone(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (_, front):
        flush = stub_of(front).FlushCache(common_pb2.FlushCacheRequest())
        subscription = stub_of(front).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
        for call in (flush, subscription):
            await failure_of(call, grpc.StatusCode.UNIMPLEMENTED, "the scheduler itself")
        shared = front.stub.GenerateMany()
        await shared.write(pb.GenerateManyRequest(get_loads=pb.GetLoadsRequest()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in shared:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "call the scheduler itself" in caught.value.details()


async def test_without_a_scheduler_it_is_unavailable(checkpoint: Path) -> None:
    async with serve_front_end(checkpoint, f"127.0.0.1:{free_port('127.0.0.1')}", waits=False) as front:
        calls = [
            stub_of(front).HealthCheck(vllm_engine_pb2.HealthCheckRequest(), wait_for_ready=True),
            stub_of(front).GetLoads(vllm_engine_pb2.GetLoadsRequest(), wait_for_ready=True),
        ]
        for call in calls:
            await failure_of(call, grpc.StatusCode.UNAVAILABLE, "no connection to the scheduler")


async def test_a_load_that_is_asked_for_as_the_scheduler_goes_away_is_unavailable(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        question = vllm_engine_pb2.GetLoadsRequest()
        asking = [asyncio.ensure_future(stub_of(front).GetLoads(question)) for _ in range(20)]
        stack.stop.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        await stack.running
        await front.until_ready(False)
        answers += await asyncio.gather(stub_of(front).GetLoads(question), return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    assert answers[-1] in failures
    assert {failure.code() for failure in failures} == {grpc.StatusCode.UNAVAILABLE}
