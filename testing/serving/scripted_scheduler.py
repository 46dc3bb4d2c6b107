"""A real gRPC server of the public proto that answers with responses written by the test."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterable[pb.GenerateResponse]]
WORDS = (" there", " was", " a", " fox", ".")


class ScriptedScheduler(pb_grpc.SchedulerServiceServicer):
    """A scheduler that records its requests.

    `script` answers Generate. `ended` is set when a Generate RPC has ended.
    """

    def __init__(self) -> None:
        self.script: Script = tell_story
        self.requests: list[Any] = []
        self.time_remaining: list[float | None] = []
        self.ended = threading.Event()
        self.info = pb.GetServerInfoResponse(
            version="1", served_model_name="storyteller", instance_id="one", max_model_len=512, vocab_size=4096
        )
        self.loads = pb.GetLoadsResponse(num_running=3, num_device_blocks=200, num_held_blocks=50)
        self.blocks = pb.GetBlocksResponse()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.time_remaining.append(context.time_remaining())
        context.add_callback(self.ended.set)
        yield from self.script(request, context)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self.requests.append(request)
        if request.request_id != "known":
            abort(context, grpc.StatusCode.NOT_FOUND, f"no running request {request.request_id!r}")
        return pb.AbortResponse()

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> Any:
        return self.info

    def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.ServicerContext) -> Any:
        return self.loads

    def GetBlocks(self, request: pb.GetBlocksRequest, context: grpc.ServicerContext) -> Any:
        return self.blocks


@contextmanager
def serving(
    scheduler: ScriptedScheduler, credentials: grpc.ServerCredentials | None = None, *, port: int = 0
) -> Iterator[str]:
    """Run the server, and yield its address."""
    # As a scheduler, the server allows any number of pings. On a loaded machine a test can last many.
    options = [("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=options)
    pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    if credentials is None:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=0).wait()


def tell_story(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """Yield WORDS for every sample, one token each, with the samples in turn."""
    num_samples = request.sampling.n or 1
    for i, word in enumerate(WORDS):
        for index in range(num_samples):
            yield delta(index, i, [100 + i], word, last=i == len(WORDS) - 1)


def delta(index: int, first_token: int, token_ids: list[int], text: str = "", *, last: bool = False) -> Any:
    response = pb.GenerateResponse(
        request_id="drawn", index=index, first_token=first_token, token_ids=token_ids, text=text
    )
    if last:
        response.finish_reason = pb.FINISH_REASON_LENGTH
        completion_tokens = first_token + len(token_ids)
        usage = pb.Usage(prompt_tokens=7, cached_tokens=4 + index, completion_tokens=completion_tokens)
        response.usage.CopyFrom(usage)
    return response


def never_end(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """Yield tokens until the RPC ends."""
    i = 0
    while context.is_active():
        yield delta(0, i, [i % 50], " so")
        i += 1
        time.sleep(0.001)


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str, *details: Any) -> None:
    """End an RPC with google.rpc details, as the scheduler does."""
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=text, details=packed)
    context.abort_with_status(rpc_status.to_status(status))


def field_violation(field: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_details_pb2.BadRequest(field_violations=[violation])


def retry_after(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(int(seconds * 1000))
    return info
