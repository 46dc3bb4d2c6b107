"""Embeddings: requests whose prompt is computed and pooled, and that end with that."""

import grpc

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import OutputMode
from scheduler_service.rpc.public.intake import Intake
from scheduler_service.rpc.status import RpcError


def embedding_request(request: scheduler_pb2.EmbedRequest) -> scheduler_pb2.GenerateRequest:
    """Return the GenerateRequest that asks for the same."""
    message = scheduler_pb2.GenerateRequest(embed=True)
    for descriptor, value in request.ListFields():
        if descriptor.message_type is None:
            setattr(message, descriptor.name, value)
        else:
            getattr(message, descriptor.name).CopyFrom(value)
    return message


async def embed(
    intake: Intake, message: scheduler_pb2.GenerateRequest, time_remaining: float | None
) -> scheduler_pb2.GenerateResponse:
    """Return the one response to a request for an embedding. Leaving early aborts the request. Raises RpcError."""
    generation = await intake.begin(message, time_remaining, OutputMode.WHOLE, with_text=False)
    try:
        await generation.wait_for_end()
        (output,) = generation.outputs
        response = output.response(0, 0)
    finally:
        generation.cancel()
    if not response.embedding:
        raise RpcError(grpc.StatusCode.CANCELLED, "the request was aborted before its embedding was made")
    return response
