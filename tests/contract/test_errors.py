"""The errors that a client of the public service gets for an invalid request or a server failure."""

import asyncio
import math
from pathlib import Path

import grpc
import pytest

from pagewire.common.wire.messages import RowStatus
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from testing.scheduler_stack import VOCAB_SIZE, details, expected_tokens, request, serve, status_of
from testing.seeds import seeded
from testing.serving.failures import failure_of

PROMPT = [5, 6, 7, 8, 9]
UINT32_MAX, UINT64_MAX, INT32_MAX = 2**32 - 1, 2**64 - 1, 2**31 - 1
NAN, INF = math.nan, math.inf

# For every field of SamplingParams: values that must be accepted, and values that must be refused.
BOUNDARIES: dict[str, tuple[list, list]] = {
    "n": ([1, 16], [0, 17, UINT32_MAX]),
    "temperature": ([0, 1e-30, 100], [NAN, INF, -INF, -1, -1e-30, 100.001]),
    "top_p": ([1e-6, 1], [NAN, INF, -INF, -1, 0, 1.0001]),
    "top_k": ([0, 1, VOCAB_SIZE, UINT32_MAX], []),
    "min_p": ([0, 1], [NAN, INF, -INF, -1, 1.0001]),
    "presence_penalty": ([-2, 0, 2], [NAN, INF, -INF, -2.001, 2.001]),
    "frequency_penalty": ([-2, 0, 2], [NAN, INF, -INF, -2.001, 2.001]),
    "repetition_penalty": ([1e-6, 1, 100], [NAN, INF, -INF, -1, 0, 100.001]),
    "seed": ([0, 1, UINT64_MAX], []),
    "stop": ([[], ["x"], ["x" * 256] * 16], [[""], ["x" * 257], ["x"] * 17]),
    "stop_token_ids": ([[], [0], [VOCAB_SIZE - 1] * 64], [[VOCAB_SIZE], [UINT32_MAX], [0] * 65]),
    "ignore_eos": ([False, True], []),
    "max_tokens": ([1, 256 - len(PROMPT)], [0, 257 - len(PROMPT), UINT32_MAX]),
    "min_tokens": ([0, 3], [4, UINT32_MAX]),
    "logprobs": ([0, 20, UINT32_MAX], [21, UINT32_MAX - 1]),
    "prompt_logprobs": ([0, 20, UINT32_MAX], [21, UINT32_MAX - 1]),
    "logprob_token_ids": ([[], [0], [VOCAB_SIZE - 1] * 128], [[VOCAB_SIZE], [UINT32_MAX], [0] * 129]),
    "logit_bias": (
        [{}, {0: -100, VOCAB_SIZE - 1: 100}],
        [{0: NAN}, {0: INF}, {0: -INF}, {0: 100.01}, {VOCAB_SIZE: 0}, dict.fromkeys(range(1025), 0)],
    ),
    "include_stop_str_in_output": ([False, True], []),
    "skip_special_tokens": ([False, True], []),
    "beam_width": ([1, 16], [0, 17, UINT32_MAX]),
    "length_penalty": ([-1e300, 0, 1e300], [NAN, INF, -INF]),
    "early_stopping": ([0, 1, 2, 3], [4, INT32_MAX]),
}
BEAM_FIELDS = ("length_penalty", "early_stopping")  # without an effect unless `beam_width` is set


def test_every_sampling_field_has_boundaries() -> None:
    descriptor = scheduler_pb2.SamplingParams.DESCRIPTOR
    others = {
        field.name for field in descriptor.oneofs_by_name["structured_output"].fields
    }  # test_structured_output.py
    assert set(BOUNDARIES) == {field.name for field in descriptor.fields} - others


async def test_every_sampling_field_at_its_boundaries(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        for field, (good, bad) in BOUNDARIES.items():
            others = {"max_tokens": 3} | ({"beam_width": 2} if field in BEAM_FIELDS else {})
            for value in good:
                error = await status_of(stack, request(PROMPT, **(others | {field: value})))
                assert error is None, f"{field}={value!r}: {error}"
            for value in bad:
                error = await status_of(stack, request(PROMPT, **(others | {field: value})))
                assert error is not None, f"{field}={value!r} was taken"
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{field}={value!r}: {error}"
                violation = details(error)[0].field_violations[0]
                assert violation.field.startswith(f"sampling.{field}"), f"{field}={value!r}: {violation}"
        assert stack.worker.epochs == stack.worker.epochs[:1]
        await stack.until_idle()


async def test_every_request_field_at_its_boundaries(checkpoint: Path) -> None:
    def message(**fields: object) -> scheduler_pb2.GenerateRequest:
        return scheduler_pb2.GenerateRequest(**({"token_ids": {"ids": PROMPT}, "sampling": {"max_tokens": 2}} | fields))

    good = [
        {"request_id": "x" * 128},
        {"request_id": "é😀"},
        {"priority": -(2**31)},
        {"priority": INT32_MAX},
        {"tenant": "t" * 1024, "cache_salt": "s" * 1024, "session_id": "é" * 128},
        {"will_return": False, "retention_seconds": 1},
        {"will_return": True, "retention_seconds": UINT32_MAX},
        {"token_ids": {"ids": [0]}},
        {"token_ids": {"ids": [VOCAB_SIZE - 2] * 254}},
        {"sampling": None, "token_ids": {"ids": [1] * 250}},
    ]
    bad = [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"tenant": "t" * 1025}, "tenant"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"retention_seconds": 0}, "retention_seconds"),
        ({"token_ids": None}, "prompt"),
        ({"token_ids": {"ids": []}}, "token_ids.ids"),
        ({"token_ids": {"ids": [VOCAB_SIZE]}}, "token_ids.ids[0]"),
        ({"token_ids": {"ids": [0, UINT32_MAX]}}, "token_ids.ids[1]"),
        ({"token_ids": {"ids": [0] * 256}}, "token_ids.ids"),
        ({"token_ids": {"ids": [0] * 255}}, "sampling.max_tokens"),
        ({"token_ids": None, "text": ""}, "text"),
        ({"token_ids": None, "text": "a" * 3000}, "text"),
    ]
    async with serve(checkpoint) as stack:
        for fields in good:
            error = await status_of(stack, message(**fields))
            assert error is None, f"{fields}: {error}"
        for fields, field in bad:
            error = await status_of(stack, message(**fields))
            assert error is not None, f"{fields} was taken"
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{fields}: {error}"
            assert details(error)[0].field_violations[0].field == field, f"{fields}: {error}"
        assert (
            "has 256 tokens, this server allows 256"
            in (await status_of(stack, message(token_ids={"ids": [0] * 256}))).details()
        )


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_requests_are_served_or_refused_as_invalid(checkpoint: Path, seed: int) -> None:
    rng = seeded(seed)
    async with serve(checkpoint) as stack:
        for _ in range(25):
            sampling = {"max_tokens": 3}
            for field in rng.sample(sorted(BOUNDARIES), rng.randrange(1, 8)):
                good, bad = BOUNDARIES[field]
                sampling[field] = rng.choice(bad if bad and rng.random() < 0.1 else good)
            error = await status_of(stack, request(PROMPT, **sampling))
            assert error is None or error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{sampling}: {error}"
        await stack.until_idle()


async def test_abort(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        message = request(PROMPT, n=3)
        message.request_id, message.tenant = "mine", "me"
        running = asyncio.create_task(stack.generate(message))
        await stack.until(lambda loads: loads.num_generation_tokens > 10)
        for name in ({"request_id": "mine"}, {"request_id": "other", "tenant": "me"}, {}):
            await failure_of(stack.stub.Abort(scheduler_pb2.AbortRequest(**name)), grpc.StatusCode.NOT_FOUND)
        await stack.stub.Abort(scheduler_pb2.AbortRequest(request_id="mine", tenant="me"))
        result = await running
        assert [last.finish_reason for last in result.last.values()] == [scheduler_pb2.FINISH_REASON_ABORT] * 3
        for index, token_ids in result.token_ids.items():
            assert token_ids == expected_tokens(PROMPT, len(token_ids), sample_index=index)
        await stack.until_idle()


@pytest.mark.parametrize("text", ["x", "日", "😀", "\n"])
async def test_an_error_that_quotes_a_long_text_reaches_its_client(checkpoint: Path, text: str) -> None:
    """gRPC clients replace a status whose message is larger than 8 KiB by RESOURCE_EXHAUSTED."""
    async with serve(checkpoint) as stack:
        name = {"request_id": text * 12_000}
        calls = [
            stack.stub.Abort(scheduler_pb2.AbortRequest(**name)),
            stack.stub.GetRequest(scheduler_pb2.GetRequestRequest(**name)),
            stack.stub.GetResult(scheduler_pb2.GetResultRequest(**name)),
            stack.stub.Attach(scheduler_pb2.AttachRequest(**name)).read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="no ") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_duplicate_ids_are_refused_within_a_tenant(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        message = request(PROMPT, max_tokens=50)
        message.request_id = "same"
        errors = await asyncio.gather(*(status_of(stack, message) for _ in range(50)))
        refused = [error for error in errors if error is not None]
        assert len(refused) == 49
        assert {error.code() for error in refused} == {grpc.StatusCode.ALREADY_EXISTS}
        assert await status_of(stack, message) is None
        others = [scheduler_pb2.GenerateRequest() for _ in range(5)]
        for index, other in enumerate(others):
            other.CopyFrom(message)
            other.tenant = f"tenant {index}"
        assert await asyncio.gather(*(status_of(stack, other) for other in others)) == [None] * 5


async def test_a_full_queue_refuses_with_a_delay(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1, max_waiting_requests=3) as stack:
        stack.worker.step_seconds = 0.005
        errors = await asyncio.gather(*(status_of(stack, request(PROMPT, max_tokens=30)) for _ in range(20)))
        refused = [error for error in errors if error is not None]
        assert refused
        assert len(refused) < 20
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details(error)[1].retry_delay.seconds > 0
        assert await status_of(stack, request(PROMPT, max_tokens=3)) is None


async def test_cancels_at_random_moments_leave_no_block_held(checkpoint: Path) -> None:
    seed = 7
    rng = seeded(seed)
    async with serve(checkpoint, max_num_seqs=16) as stack:
        stack.worker.step_seconds = 0.001

        async def cancelled(delay: float) -> None:
            call = stack.stub.Generate(request([rng.randrange(299) for _ in range(rng.randrange(1, 60))], n=2))
            reading = asyncio.create_task(call.read())
            await asyncio.sleep(delay)
            reading.cancel()
            call.cancel()

        for _ in range(5):
            await asyncio.gather(*(cancelled(rng.random() * 0.2) for _ in range(40)))
        loads = await stack.until_idle()
        assert loads.num_held_blocks == 0
        assert await status_of(stack, request(PROMPT, max_tokens=3)) is None


async def test_deadlines_hold_while_running_and_while_queued(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1) as stack:
        stack.worker.step_seconds = 0.02
        errors = await asyncio.gather(*(status_of(stack, request(PROMPT), timeout=0.3) for _ in range(4)))
        assert {error.code() for error in errors if error} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert None not in errors
        await stack.until_idle()


async def test_a_tenant_has_a_queue_of_its_own(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1, max_tenant_waiting_requests=2) as stack:
        stack.worker.step_seconds = 0.005
        messages = [request(PROMPT, max_tokens=20) for _ in range(10)]
        for message in messages:
            message.tenant = "many"
        errors, other = await asyncio.gather(
            asyncio.gather(*(status_of(stack, message) for message in messages)),
            status_of(stack, request(PROMPT, max_tokens=3)),
        )
        refused = [error for error in errors if error is not None]
        assert 0 < len(refused) < 10
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert details(refused[0])[1].retry_delay.seconds > 0
        assert other is None


async def test_bad_logits_end_their_own_request_only(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.002
        poison = request([1, 2, VOCAB_SIZE - 1, 4])
        good = [request([index, *PROMPT], max_tokens=40) for index in range(5)]
        error, *results = await asyncio.gather(status_of(stack, poison), *(stack.generate(each) for each in good))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "not numbers" in error.details()
        assert [result.token_ids[0] for result in results] == [
            expected_tokens([index, *PROMPT], 40) for index in range(5)
        ]


async def test_a_row_that_does_not_fit_into_memory_ends_its_own_request_only(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.bad_sequences.update(dict.fromkeys(range(2), RowStatus.OUT_OF_MEMORY))
        error = await status_of(stack, request(PROMPT, max_tokens=3))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "lower the worker's --gpu-memory-utilization" in error.details()
        assert details(error)[1].retry_delay.seconds > 0
        stack.worker.bad_sequences.clear()
        result = await stack.generate(request(PROMPT, max_tokens=5))
        assert result.token_ids[0] == expected_tokens(PROMPT, 5)


async def test_drain_finishes_what_runs_and_refuses_the_rest(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        running = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=100)))
        await stack.until(lambda loads: loads.num_generation_tokens > 5)
        stack.stop.set()
        while (error := await status_of(stack, request(PROMPT, max_tokens=1))) is None:
            pass  # the request arrived before the drain began
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)[1].retry_delay.seconds > 0
        assert (await running).token_ids[0] == expected_tokens(PROMPT, 100)
        assert await stack.running == 0


async def test_drain_ends_the_rest_after_its_limit(checkpoint: Path) -> None:
    async with serve(checkpoint, drain_timeout=0.2) as stack:
        stack.worker.step_seconds = 0.05
        running = asyncio.create_task(status_of(stack, request(PROMPT)))
        await stack.until(lambda loads: loads.num_generation_tokens > 1)
        stack.stop.set()
        assert await stack.running == 0
        error = await running
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shut down" in error.details()
