"""The GenerateMany RPC: results and errors equal Generate's, with one message a step for all streams."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service.api.grpc.shared_call import SharedCall
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.checkpoint.model_info import read_model_info
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from testing.scheduler_stack import details, expected_tokens, request, serve
from testing.seeds import seeded
from tests.contract.shared_stream import SharedStream

PROMPT = [1, 2, 3, 4, 5]
DEADLINE = 30


async def test_token_only_streams_come_in_columns(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.002
        shared = SharedStream(stack)
        first = request([7, 7], max_tokens=60)
        first.request_id = "mine"
        submitted = [await shared.submit(first, token_only=True)]
        for seed in range(1, 8):
            submitted.append(await shared.submit(request(PROMPT, max_tokens=60, seed=seed, n=2), token_only=True))
        for seed, streams in enumerate(submitted):
            for index, stream in enumerate(streams):
                await asyncio.wait_for(stream.ended.wait(), DEADLINE)
                prompt = PROMPT if seed else [7, 7]
                assert stream.token_ids == expected_tokens(prompt, 60, seed=seed, sample_index=index)
                assert stream.text == ""
                assert stream.last.finish_reason == pb.FINISH_REASON_LENGTH
                assert stream.last.usage.prompt_tokens == len(prompt)
        assert submitted[0][0].last.request_id == "mine"
        # In a steady step, a message contains one token of every stream, and no other data.
        steady = [message for message in shared.messages if len(message.stream_ids) == 15]
        assert len(steady) > 30
        assert all(not message.deltas and not message.failures for message in steady)
        await shared.close()


async def test_token_only_with_logprobs_and_beams(checkpoint: Path) -> None:
    requests = [
        request(PROMPT, max_tokens=9, logprobs=2, prompt_logprobs=1),
        request(PROMPT, max_tokens=9, prompt_logprobs=1),
        request(PROMPT, max_tokens=9, beam_width=3, n=3),
    ]
    async with serve(checkpoint) as stack:
        shared = SharedStream(stack)
        for each in requests:
            streams = await shared.generate(each, token_only=True)
            alone = await stack.generate(each)
            for index, stream in enumerate(streams):
                assert stream.token_ids == alone.token_ids[index]
                assert stream.text == ""
                assert stream.last.cumulative_logprob == alone.last[index].cumulative_logprob
        await shared.close()


@pytest.mark.parametrize(
    ("message", "field"), [(request("once"), "text"), (request(PROMPT, stop=["a"]), "sampling.stop")]
)
async def test_token_only_takes_no_text(checkpoint: Path, message: pb.GenerateRequest, field: str) -> None:
    async with serve(checkpoint) as stack:
        shared = SharedStream(stack)
        (stream,) = await shared.generate(message, token_only=True)
        assert stream.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert stream.failure.field == field
        await shared.close()


async def test_stop_and_abort(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        shared = SharedStream(stack)
        (stopped,) = await shared.submit(request(PROMPT, max_tokens=200), token_only=True)
        (aborted,) = await shared.submit(request(PROMPT, max_tokens=200), token_only=True)
        (whole,) = await shared.submit(request(PROMPT, max_tokens=30), token_only=True)
        await stack.until(lambda loads: loads.num_generation_tokens > 20)
        await shared.stop(stopped, 3)
        await shared.abort(aborted)
        for stream, reason in ((stopped, pb.FINISH_REASON_STOP), (aborted, pb.FINISH_REASON_ABORT)):
            await asyncio.wait_for(stream.ended.wait(), DEADLINE)
            assert stream.last.finish_reason == reason
            assert len(stream.token_ids) < 200
        await shared.abort(aborted)  # aborting again has no effect
        await shared.close()
        assert whole.token_ids == expected_tokens(PROMPT, 30)
        await stack.until_idle()


async def test_a_timeout_ends_a_request(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        shared = SharedStream(stack)
        (stream,) = await shared.generate(request(PROMPT, max_tokens=240), timeout_seconds=0.3)
        assert stream.failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert 0 < len(stream.token_ids) < 240
        (late,) = await shared.generate(request(PROMPT, max_tokens=2), timeout_seconds=0)
        assert late.failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        await stack.until_idle()
        await shared.close()


async def test_a_connection_that_goes_takes_its_requests(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        shared = SharedStream(stack, reads=False)
        for token_only in (True, False) * 4:
            await shared.submit(request(PROMPT, max_tokens=240), token_only=token_only)
        await stack.until(lambda loads: loads.num_running == 8)
        shared.call.cancel()
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 8 * 240


@pytest.mark.parametrize("token_only", [False, True])
@pytest.mark.parametrize("max_weight", [65_536, 600])
async def test_a_slow_reader_gets_fewer_and_longer_messages(
    checkpoint: Path, token_only: bool, max_weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.api.grpc.shared_call._MAX_MESSAGE_WEIGHT", max_weight)
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serve(checkpoint) as stack, grpc.aio.insecure_channel(stack.url[len("grpc://") :], window) as channel:
        shared = SharedStream(replace(stack, stub=pb_grpc.SchedulerServiceStub(channel)), reads=False)
        submitted = [
            await shared.submit(request(PROMPT, max_tokens=200, seed=seed, n=4), token_only=token_only)
            for seed in range(4)
        ]
        await stack.until(lambda loads: loads.num_generation_tokens == 4 * 4 * 200)
        await stack.until_idle()
        reading = asyncio.create_task(shared.read())
        for seed, streams in enumerate(submitted):
            for index, stream in enumerate(streams):
                await asyncio.wait_for(stream.ended.wait(), DEADLINE)
                assert stream.token_ids == expected_tokens(PROMPT, 200, seed=seed, sample_index=index)
        await shared.call.done_writing()
        await asyncio.wait_for(reading, DEADLINE)
        sizes = [
            len(message.token_ids) + sum(len(entry.delta.token_ids) for entry in message.deltas)
            for message in shared.messages
        ]
        assert sum(sizes) == 4 * 4 * 200
        # Messages that fit into the flow control window were sent while tokens arrived. The rest is sent in long
        # messages. The last stream of a message may exceed the weight.
        assert 300 < max(sizes) < max_weight + 200
        assert len(sizes) < 60


async def test_rules_of_the_call(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        repeated = [
            pb.GenerateManyRequest(submit=pb.Submission(stream_id=id, request=request(PROMPT, max_tokens=2, n=2)))
            for id in (4, 5)
        ]
        for messages, field in ((repeated, "submit.stream_id"), ([pb.GenerateManyRequest()], "command")):
            call = stack.stub.GenerateMany(iter(messages))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            bad_request, _ = details(refused.value)
            assert bad_request.field_violations[0].field == field
        await stack.until_idle()


async def test_the_server_tells_what_it_is_and_when_that_changes(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        shared = SharedStream(stack)
        info = await asyncio.wait_for(shared.infos.get(), DEADLINE)
        assert info == await stack.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.worker.block_size == 4
        assert info.max_sequence_tokens == 256
        assert len(info.model_digest) == 32
        await stack.worker.kill()
        gone = await asyncio.wait_for(shared.infos.get(), DEADLINE)
        assert not gone.HasField("worker")
        await stack.worker.start()
        back = await asyncio.wait_for(shared.infos.get(), DEADLINE)
        assert back.worker.epoch > info.worker.epoch
        await shared.close()


async def test_draining_refuses_new_requests_and_ends_the_call(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        shared = SharedStream(stack)
        (running,) = await shared.submit(request(PROMPT, max_tokens=50), token_only=True)
        await stack.until(lambda loads: loads.num_generation_tokens > 3)
        stack.stop.set()
        while (info := await asyncio.wait_for(shared.infos.get(), DEADLINE)) and not info.unavailable_reason:
            pass
        (refused,) = await shared.generate(request(PROMPT, max_tokens=2))
        assert refused.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert await asyncio.wait_for(stack.running, DEADLINE) == 0
        assert running.token_ids == expected_tokens(PROMPT, 50)
        assert await shared.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("seed", range(3))
async def test_random_requests_together(checkpoint: Path, seed: int) -> None:
    rng = seeded(seed)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    async with serve(checkpoint) as stack:
        shared = SharedStream(stack)
        expected = []
        for i in range(60):
            prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
            num_tokens, n, token_only = rng.randrange(1, 60), rng.randrange(1, 4), rng.random() < 0.5
            message = request(prompt, max_tokens=num_tokens, n=n, seed=i)
            streams = await shared.submit(message, token_only=token_only)
            expected.append((streams, prompt, num_tokens, i, token_only))
            if rng.random() < 0.2:
                await shared.abort(streams[0])
        await shared.close()
        for streams, prompt, num_tokens, request_seed, token_only in expected:
            for index, stream in enumerate(streams):
                if stream.failure is not None:
                    assert stream.failure.code == grpc.StatusCode.CANCELLED.value[0]
                    break
                tokens = expected_tokens(prompt, num_tokens, seed=request_seed, sample_index=index)
                if stream.last.finish_reason == pb.FINISH_REASON_ABORT:
                    tokens = tokens[: len(stream.token_ids)]
                assert stream.token_ids == tokens
                if not token_only and "\ufffd" not in stream.text:
                    assert stream.text == tokenizer.decode(tokens)
        await stack.until_idle()


class RefusingIntake:
    def __init__(self, checkpoint: Path) -> None:
        self.model = read_model_info(str(checkpoint))

    async def begin(self, *_: object, **__: object) -> ActiveRequest:
        raise RefusedError(Reason.INVALID_ARGUMENT, "x" * 100)


class UnreadContext:
    """The context of a client that never reads."""

    async def write(self, message: pb.GenerateManyResponse) -> None:
        await asyncio.Event().wait()


async def test_failures_that_are_not_read_are_bounded(checkpoint: Path) -> None:
    """Failures that the client does not read are limited.

    Later submissions wait in the client, because of HTTP/2 flow control.
    """
    taken = 0

    async def submissions() -> AsyncIterator[pb.GenerateManyRequest]:
        nonlocal taken
        for taken in range(100_000):
            yield pb.GenerateManyRequest(submit=pb.Submission(stream_id=taken, request=request(PROMPT)))
            await asyncio.sleep(0)

    call = SharedCall(RefusingIntake(checkpoint), Call(Caller(None)), pb.GetServerInfoResponse, None)
    serving = asyncio.create_task(call.serve(submissions(), UnreadContext()))
    turns_without_news, before = 0, -1
    while turns_without_news < 100:
        turns_without_news = turns_without_news + 1 if taken == before else 0
        before = taken
        await asyncio.sleep(0)
    assert 1000 < taken < 1100
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_the_last_stream_ids(checkpoint: Path) -> None:
    """Samples for which no stream id is left are refused, and the RPC continues."""
    last = 2**64 - 1
    async with serve(checkpoint) as stack:
        call = stack.stub.GenerateMany()

        async def submit(stream_id: int, n: int) -> None:
            submission = pb.Submission(stream_id=stream_id, request=request(PROMPT, max_tokens=2, n=n))
            await call.write(pb.GenerateManyRequest(submit=submission))

        async def failure() -> pb.StreamFailure:
            while not (message := await call.read()).failures:
                assert message is not grpc.aio.EOF
            (failure,) = message.failures
            return failure

        for stream_id, n in ((last, 2), (last - 14, 16)):
            await submit(stream_id, n)
            told = await asyncio.wait_for(failure(), DEADLINE)
            assert (told.stream_id, told.field) == (stream_id, "submit.stream_id")
            assert told.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert f"stream_id is {stream_id} and n is {n}, but stream ids end at {last}" in told.message
        for stream_id, n in ((7, 2), (last - 15, 16)):
            await submit(stream_id, n)
        await call.done_writing()
        ended = set()
        while (message := await call.read()) is not grpc.aio.EOF:
            ended |= {delta.stream_id for delta in message.deltas if delta.delta.finish_reason}
        assert ended == {7, 8, *range(last - 15, last + 1)}
        assert await call.code() is grpc.StatusCode.OK
