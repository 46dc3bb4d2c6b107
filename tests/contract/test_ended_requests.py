"""Requests that end while the worker computes their prompts. Late results of these requests affect no other request."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.scheduler_stack import Stack, expected_tokens, request, serve

PROMPTS = [[first, *range(1, 250)] for first in range(4)]

Call = grpc.aio.UnaryStreamCall


def _messages() -> list[scheduler_pb2.GenerateRequest]:
    messages = [request(prompt, max_tokens=1, prompt_logprobs=0) for prompt in PROMPTS]
    for number, message in enumerate(messages):
        message.request_id = f"r{number}"
    return messages


async def _deadline(stack: Stack) -> None:
    """End the requests by deadline."""
    calls = [stack.generate(message, timeout=0.1) for message in _messages()]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {outcome.code() for outcome in outcomes} == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def _calls(stub: scheduler_pb2_grpc.SchedulerServiceStub, stack: Stack) -> list[Call]:
    calls = [stub.Generate(message) for message in _messages()]
    await stack.until(lambda loads: loads.num_running > 0 and loads.num_running + loads.num_waiting == len(calls))
    return calls


async def _cancelled(stack: Stack) -> None:
    """End the requests by cancelling their RPCs."""
    for call in await _calls(stack.stub, stack):
        call.cancel()


async def _aborted(stack: Stack) -> None:
    """End the requests by Abort RPCs."""
    calls = await _calls(stack.stub, stack)
    for message in _messages():
        await stack.stub.Abort(scheduler_pb2.AbortRequest(request_id=message.request_id))
    for call in calls:
        assert [response async for response in call][-1].finish_reason == scheduler_pb2.FINISH_REASON_ABORT


async def _disconnected(stack: Stack) -> None:
    """End the requests by closing the client's connection."""
    async with grpc.aio.insecure_channel(stack.url.removeprefix("grpc://")) as channel:
        await _calls(scheduler_pb2_grpc.SchedulerServiceStub(channel), stack)


@pytest.mark.parametrize("end", [_deadline, _cancelled, _aborted, _disconnected])
async def test_prompts_with_log_probabilities_end_in_the_middle(
    checkpoint: Path, end: Callable[[Stack], Awaitable[None]]
) -> None:
    async with serve(checkpoint, max_num_batched_tokens=16) as stack:
        stack.worker.step_seconds = 0.01  # a prompt needs 16 steps, and two chunks are always in flight
        await end(stack)
        await stack.until_idle()
        stack.worker.step_seconds = 0.0
        result = await stack.generate(request(PROMPTS[0], max_tokens=1, prompt_logprobs=0))
        entries = [entry.token_id for response in result.responses for entry in response.prompt_logprobs]
        assert entries == PROMPTS[0][1:]
        assert result.token_ids[0] == expected_tokens(PROMPTS[0], 1)
        assert not stack.running.done()
        assert len(stack.worker.epochs) == 1
