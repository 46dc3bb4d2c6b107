"""One Generate call, from its message to its last response."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.call import Call
from scheduler_service.rpc.public.intake import Intake
from scheduler_service.rpc.public.sample import Sample
from scheduler_service.serving.engine import RequestEngine


async def generate(
    message: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext, intake: Intake, engine: RequestEngine
) -> None:
    """Serve the call. A client that goes away takes its request with it. Raises RpcError."""
    request = await intake.resolve(message, context.time_remaining())
    with_logprobs = request.sampling.num_logprobs is not None
    samples = [
        Sample(request.request_id, index, transcript, with_logprobs=with_logprobs)
        for index, transcript in enumerate(intake.transcripts(message, request))
    ]
    call = Call(samples, engine)
    intake.submit(request, call.delivery)
    try:
        await write_all(call.responses(), context)
    finally:
        engine.cancel(call.delivery.sequence_ids)


async def write_all(messages: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext) -> None:
    async with contextlib.aclosing(messages) as closing:
        async for message in closing:
            await context.write(message)
