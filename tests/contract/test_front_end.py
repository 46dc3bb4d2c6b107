"""A front end between clients and a scheduler, over gRPC, behaves as the scheduler itself does."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from pagewire import AsyncClient, SamplingParams, Unavailable
from pagewire.common.wire.messages import RowStatus
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service.api.grpc.request_servicer import SERVICE_NAME
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import EOS, VOCAB_SIZE, details, expected_tokens, make_checkpoint, request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import DEADLINE, FrontEnd, serve_both, serve_front_end
from tests.contract.shared_stream import SharedStream

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "message",
    [
        request("once upon", max_tokens=20),
        request("once upon", max_tokens=200, stop=[" ", "q"]),
        request("once upon", max_tokens=200, stop=["a"], include_stop_str_in_output=True, n=3),
        request(PROMPT, max_tokens=30, n=3),
        request(PROMPT),
        request(PROMPT, max_tokens=9, logprobs=3, prompt_logprobs=2, n=2),
        request(PROMPT, max_tokens=12, beam_width=3, n=2),
        request(PROMPT, max_tokens=60, stop_token_ids=[EOS, 17, 250], ignore_eos=True),
    ],
    ids=str,
)
async def test_outputs_are_the_schedulers(checkpoint: Path, message: pb.GenerateRequest) -> None:
    async with serve_both(checkpoint) as (stack, front):
        message.request_id = "same"
        direct = await stack.generate(message)
        await stack.until_idle()
        through = await front.generate(message)
        assert through.token_ids == direct.token_ids
        assert through.texts == direct.texts
        for index, last in through.last.items():
            assert last.request_id == "same"
            expected = direct.last[index]
            assert (last.finish_reason, last.stop_text, last.stop_token_id) == (
                expected.finish_reason,
                expected.stop_text,
                expected.stop_token_id,
            )
            assert last.usage.prompt_tokens == expected.usage.prompt_tokens
            assert last.usage.completion_tokens == expected.usage.completion_tokens
            assert last.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
        for field in ("logprobs", "prompt_logprobs"):
            columns = [
                [(each.index, entry) for each in result.responses for entry in getattr(each, field)]
                for result in (through, direct)
            ]
            assert sorted(columns[0], key=str) == sorted(columns[1], key=str)
        await stack.until_idle()


@pytest.mark.parametrize(
    "message",
    [
        request(PROMPT, temperature=-1.0),
        request([VOCAB_SIZE]),
        request("once", max_tokens=5000),
        request("x" * 4000),
        pb.GenerateRequest(),
        request([1, VOCAB_SIZE - 1, 2], max_tokens=5),
    ],
    ids=lambda message: str(message)[:60],
)
async def test_errors_are_the_schedulers(checkpoint: Path, message: pb.GenerateRequest) -> None:
    async with serve_both(checkpoint) as (stack, front):
        errors = []
        for generate in (stack.generate, front.generate):
            errors.append(await failure_of(generate(message)))
        direct, through = errors
        assert (through.code(), through.details()) == (direct.code(), direct.details())
        if direct.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert details(through) == details(direct)


async def test_what_only_the_scheduler_can_refuse(checkpoint: Path) -> None:
    async with serve_both(checkpoint, max_num_seqs=1, max_waiting_requests=1) as (stack, front):
        stack.worker.step_seconds = 0.02
        named = request(PROMPT, max_tokens=200)
        named.request_id = "named"
        running = asyncio.create_task(front.generate(named))
        await stack.until(lambda loads: loads.num_running == 1)
        refused = await failure_of(front.generate(named), grpc.StatusCode.ALREADY_EXISTS)
        assert details(refused)[0].field_violations[0].field == "request_id"
        waiting = asyncio.create_task(front.generate(request(PROMPT, max_tokens=2)))
        await stack.until(lambda loads: loads.num_waiting == 1)
        refused = await failure_of(front.generate(request(PROMPT, max_tokens=2)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert details(refused)[1].retry_delay.seconds == 1
        await front.stub.Abort(pb.AbortRequest(request_id="named"))
        assert (await running).last[0].finish_reason == pb.FINISH_REASON_ABORT
        assert (await waiting).token_ids[0] == expected_tokens(PROMPT, 2)
        await failure_of(front.stub.Abort(pb.AbortRequest(request_id="named")), grpc.StatusCode.NOT_FOUND)


async def test_a_sample_fails_after_another_has_ended(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.bad_sequences[1] = RowStatus.NAN_LOGITS
        message = request(PROMPT, max_tokens=9, n=2, stop_token_ids=expected_tokens(PROMPT, 1))
        async with asyncio.timeout(DEADLINE):
            failed = await failure_of(front.generate(message))
        assert failed.code() is grpc.StatusCode.INTERNAL
        front.stop.set()  # no request is left to wait for
        async with asyncio.timeout(DEADLINE):
            await front.running


async def test_kept_token_reports_end_only_their_own_output(checkpoint: Path) -> None:
    """A client's report of kept tokens ends no other output.

    Stream ids on the link to the scheduler differ from the ids in the client's RPC.
    """
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.02
        other = asyncio.create_task(front.generate(request(PROMPT, max_tokens=60)))
        await stack.until(lambda loads: loads.num_running == 1)
        shared = SharedStream(front)
        [stream] = await shared.submit(request([9, 8], max_tokens=2), token_only=True, tells_kept=True)
        async with asyncio.timeout(DEADLINE):
            await stream.ended.wait()
        await shared.stop(stream, 1)
        await shared.close()
        assert (await other).token_ids[0] == expected_tokens(PROMPT, 60)


async def test_many_requests_on_one_call_through_a_front_end(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        shared = SharedStream(front)
        expected = []
        for seed in range(12):
            message = request("once upon" if seed % 2 else PROMPT, max_tokens=20, seed=seed)
            token_only = not seed % 2
            expected.append((message, await shared.submit(message, token_only=token_only)))
        await shared.close()
        for message, (stream,) in expected:
            direct = await stack.generate(message)
            assert stream.token_ids == direct.token_ids[0]
            assert stream.text == (direct.texts[0] if message.text else "")


async def test_the_client_through_a_front_end(checkpoint: Path) -> None:
    async with (
        serve_both(checkpoint) as (stack, front),
        AsyncClient(front.url) as client,
        AsyncClient(stack.url) as direct,
    ):
        assert await client.info() == await direct.info()
        completions = await asyncio.gather(
            *(
                client.complete(None, SamplingParams(max_tokens=20, seed=seed), prompt_token_ids=PROMPT)
                for seed in range(40)
            )
        )
        for seed, completion in enumerate(completions):
            assert completion.outputs[0].token_ids == tuple(expected_tokens(PROMPT, 20, seed=seed))


async def test_a_client_that_goes_and_a_deadline_that_passes_free_everything(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        call = front.stub.Generate(request(PROMPT, max_tokens=240))
        await stack.until(lambda loads: loads.num_generation_tokens > 0)
        call.cancel()
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 240
        await failure_of(
            front.generate(request(PROMPT, max_tokens=240), timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED
        )
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 480


async def test_a_stop_text_ends_the_request_in_the_scheduler(checkpoint: Path) -> None:
    """A stop text that a front end finds ends the request in the scheduler.

    The worker stops answering soon after the stop text, so only the front end's message can end the request.
    """
    text = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(expected_tokens(PROMPT, 30))
    stop = next(char for i, char in enumerate(text) if i > 5 and char != "\ufffd")
    async with serve(checkpoint) as stack, serve_front_end(checkpoint, stack.url) as front:
        stack.worker.step_seconds = 0.01
        generating = asyncio.create_task(front.generate(request(PROMPT, max_tokens=200, stop=[stop])))
        await stack.until(lambda loads: generating.done() or loads.num_generation_tokens >= 30)
        stack.worker.is_silent = True
        result = await asyncio.wait_for(generating, DEADLINE)
        assert stop not in result.texts[0]
        await stack.until_idle()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("GetBlocks", pb.GetBlocksRequest()),
        ("GetLoads", pb.GetLoadsRequest()),
        ("SubscribeKvEvents", pb.SubscribeKvEventsRequest()),
    ],
)
async def test_unsupported_methods_are_unimplemented(checkpoint: Path, method: str, message: object) -> None:
    async with serve_both(checkpoint) as (stack, front):
        call = getattr(front.stub, method)(message)
        await failure_of(
            call.read() if hasattr(call, "read") else call,
            grpc.StatusCode.UNIMPLEMENTED,
            f"does not serve {method}",
            stack.url.removeprefix("grpc://"),
        )


async def test_a_lost_scheduler_is_an_error_and_its_successor_is_found(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        port = int(stack.url.rpartition(":")[2])
        async with serve_front_end(checkpoint, stack.url) as front:
            stack.worker.step_seconds = 0.02
            running = [asyncio.create_task(front.generate(request(PROMPT, max_tokens=240))) for _ in range(5)]
            await stack.until(lambda loads: loads.num_running == 5)
            stack.stop.set()
            stack.stop_now.set()
            for result in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), DEADLINE):
                assert result.code() is grpc.StatusCode.UNAVAILABLE
            await stack.running
            await front.until_ready(False)
            refused = await failure_of(
                front.generate(request(PROMPT)), grpc.StatusCode.UNAVAILABLE, "no connection to the scheduler"
            )
            assert details(refused)[1].retry_delay.seconds == 2
            async with serve(checkpoint, port=port):
                await front.until_ready()
                assert (await front.generate(request(PROMPT, max_tokens=9))).token_ids[0] == expected_tokens(PROMPT, 9)


async def test_a_front_end_is_ready_once_its_scheduler_has_a_worker(checkpoint: Path) -> None:
    worker, port = FakeWorker(read_model_info(str(checkpoint)).digest), free_port("127.0.0.1")
    worker.port = free_port("127.0.0.1")

    async def begin_late(front: FrontEnd) -> None:
        while not await is_connected(front):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.02)
        health = health_pb2_grpc.HealthStub(front.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await worker.start()

    async with serve_front_end(checkpoint, f"127.0.0.1:{port}", waits=False) as front, asyncio.TaskGroup() as tasks:
        tasks.create_task(begin_late(front))
        async with serve(checkpoint, worker=worker, port=port):
            await front.until_ready()


async def is_connected(front: FrontEnd) -> bool:
    """Return whether the front end has received the scheduler's server info."""
    try:
        await front.stub.GetServerInfo(pb.GetServerInfoRequest(), wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_a_lost_worker_is_no_error(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        running = asyncio.create_task(front.generate(request(PROMPT, max_tokens=60)))
        await stack.until(lambda loads: loads.num_generation_tokens > 10)
        await stack.worker.kill()
        await stack.worker.start()
        assert (await asyncio.wait_for(running, DEADLINE)).token_ids[0] == expected_tokens(PROMPT, 60)


@pytest.mark.parametrize("differs", ["it serves another model", "its end tokens are [7], here [299]"])
async def test_another_model_is_refused(checkpoint: Path, tmp_path: Path, differs: str) -> None:
    """A front end with another model is refused.

    The end tokens of generation_config.json are compared separately, because they are not part of the model's digest.
    """
    other = make_checkpoint(tmp_path / "other", with_tokenizer="end" in differs)
    if "end" in differs:
        checkpoint = shutil.copytree(other, tmp_path / "model")
        (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7]}')
    async with serve(checkpoint) as stack, serve_front_end(other, stack.url, waits=False) as front:
        async with asyncio.timeout(DEADLINE):
            while True:  # until the front end has received the scheduler's server info
                refused = await failure_of(front.generate(request(PROMPT), timeout=5), grpc.StatusCode.UNAVAILABLE)
                if differs in refused.details():
                    break
                await asyncio.sleep(0.02)
        await front.until_ready(False)


async def test_draining_ends_what_runs_and_refuses_what_comes(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        running = asyncio.create_task(front.generate(request(PROMPT, max_tokens=60)))
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        front.stop.set()
        await front.until_ready(False)
        await failure_of(front.generate(request(PROMPT)), grpc.StatusCode.UNAVAILABLE, "shutting down")
        assert (await running).token_ids[0] == expected_tokens(PROMPT, 60)
        assert await asyncio.wait_for(front.running, DEADLINE) == 0


async def test_two_front_ends_and_the_scheduler_itself_share_it(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, one), serve_front_end(checkpoint, stack.url) as two:
        results = await asyncio.gather(
            *(
                server.generate(request(PROMPT, max_tokens=30, seed=seed))
                for seed in range(10)
                for server in (one, two, stack)
            )
        )
        for i, result in enumerate(results):
            assert result.token_ids[0] == expected_tokens(PROMPT, 30, seed=i // 3)


async def test_the_scheduler_draining_is_unavailable_here_too(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front), AsyncClient(front.url) as client:
        stack.worker.step_seconds = 0.01
        running = asyncio.create_task(front.generate(request(PROMPT, max_tokens=60)))
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        stack.stop.set()
        await front.until_ready(False)
        with pytest.raises(Unavailable):
            await client.complete("once")
        assert (await running).token_ids[0] == expected_tokens(PROMPT, 60)


async def test_a_stream_of_a_shared_call_ends_when_it_is_aborted(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        shared = SharedStream(front)
        (stream,) = await shared.submit(request(PROMPT, max_tokens=200))
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        await shared.abort(stream)
        async with asyncio.timeout(DEADLINE):
            await stream.ended.wait()
        assert stream.last.finish_reason == pb.FINISH_REASON_ABORT
        assert 0 < len(stream.token_ids) < 200
        await shared.close()


async def test_a_request_that_is_too_large_for_the_link_fails_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is too large for the link fails alone.

    A request may grow on the link, because its tokens need more bytes than its text.
    """
    async with serve_both(checkpoint) as (stack, front):
        monkeypatch.setattr("scheduler_service.links.scheduler.scheduler_link.MAX_MESSAGE_BYTES", 400)
        fine = asyncio.create_task(front.generate(request(PROMPT, max_tokens=200)))
        await stack.until(lambda loads: loads.num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="accepts at most 400 in a message; shorten it") as caught:
            await front.generate(request([VOCAB_SIZE - 1] * 200, max_tokens=1))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await fine).token_ids[0] == expected_tokens(PROMPT, 200)
        with pytest.raises(
            grpc.aio.AioRpcError, match=f"accepts at most {MAX_MESSAGE_BYTES} in a message; shorten it"
        ) as caught:
            await front.generate(request("x" * MAX_MESSAGE_BYTES))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class SlowScheduler(pb_grpc.SchedulerServiceServicer):
    """A fake scheduler that reads no message until `may_read` is set."""

    def __init__(self, info: pb.GetServerInfoResponse) -> None:
        self.info, self.may_read, self.has_abort = info, asyncio.Event(), asyncio.Event()
        self.commands: list[str | None] = []

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        yield pb.GenerateManyResponse(server_info=self.info)
        await self.may_read.wait()
        async for message in requests:
            self.commands.append(message.WhichOneof("command"))
            if self.commands[-1] == "abort":
                self.has_abort.set()


async def test_what_is_aborted_before_it_is_sent_is_never_sent(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        slow = SlowScheduler(await stack.stub.GetServerInfo(pb.GetServerInfoRequest()))
    slow.info.max_sequence_tokens = 1_000_000
    server = grpc.aio.server()
    pb_grpc.add_SchedulerServiceServicer_to_server(slow, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with serve_front_end(checkpoint, f"127.0.0.1:{port}") as front, asyncio.timeout(DEADLINE):
        messages = [request([200] * 200_000) for _ in range(16)]
        for number, message in enumerate(messages):
            message.request_id = str(number)
        calls = [front.stub.Generate(message) for message in messages]
        for message in messages:
            while not await is_aborted(front, message.request_id):  # the request is not queued yet
                pass
        last = await calls[-1].read()
        assert last.finish_reason == pb.FINISH_REASON_ABORT
        assert last.usage.prompt_tokens == 200_000
        slow.may_read.set()
        await slow.has_abort.wait()
        assert 0 < slow.commands.count("submit") < len(messages)
        assert slow.commands.count("abort") <= slow.commands.count("submit")
        for call in calls:
            call.cancel()
    await server.stop(0)


async def is_aborted(front: FrontEnd, request_id: str) -> bool:
    """Abort a request. Return whether it existed."""
    try:
        await front.stub.Abort(pb.AbortRequest(request_id=request_id))
    except grpc.aio.AioRpcError:
        return False
    return True
