"""The core's data to and from `pagewire.worker.v1`: pure translation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pagewire.common.transport.translation import decoder, encoder, unknown_field
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.core.plan import GrammarReport, StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.scheduler import WorkerProtocolError

PROTOCOL_VERSION = 6


class RefusalReason(Enum):
    STALE_EPOCH = worker_pb2.Refusal.REASON_STALE_EPOCH
    PROTOCOL_VERSION = worker_pb2.Refusal.REASON_PROTOCOL_VERSION
    FUTURE_EPOCH = worker_pb2.Refusal.REASON_FUTURE_EPOCH


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the worker does not serve an epoch, and who holds it."""

    reason: RefusalReason
    epoch: int
    instance_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    epoch: int
    last_started_step: int
    last_finished_step: int
    last_moved_step: int = 0


WorkerMessage = WorkerCapacity | Refusal | StepResult | Heartbeat | GrammarReport


_encode_plan = encoder(StepPlan, worker_pb2.StepPlan)
# By the name of the body that a message may have.
_DECODERS: dict[str, Callable[..., WorkerMessage]] = {
    "result": decoder(StepResult, worker_pb2.StepResult),
    "heartbeat": decoder(Heartbeat, worker_pb2.Heartbeat),
    "ready": decoder(WorkerCapacity, worker_pb2.WorkerCapacity),
    "refusal": decoder(Refusal, worker_pb2.Refusal),
    "grammar": decoder(GrammarReport, worker_pb2.GrammarReport),
}
_CAPACITY_COUNTS = (
    "vocab_size",
    "max_model_len",
    "block_size",
    "num_device_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
)


def encode_hello(instance_id: str, epoch: int, pipeline_depth: int) -> worker_pb2.ExecuteRequest:
    hello = worker_pb2.Hello(
        protocol_version=PROTOCOL_VERSION, instance_id=instance_id, epoch=epoch, pipeline_depth=pipeline_depth
    )
    return worker_pb2.ExecuteRequest(hello=hello)


def encode_plan(plan: StepPlan) -> worker_pb2.ExecuteRequest:
    return worker_pb2.ExecuteRequest(plan=_encode_plan(plan))


def decode_worker_message(message: worker_pb2.ExecuteResponse) -> WorkerMessage:
    """Raises WorkerProtocolError for anything that the worker should not have sent."""
    if reason := unknown_field(message):
        raise WorkerProtocolError(f"what the worker sent is not understood: {reason}")
    body = message.WhichOneof("body")
    if body is None:
        raise WorkerProtocolError("the worker sent a message without a body")
    try:
        decoded = _DECODERS[body](getattr(message, body))
    except ValueError as error:
        raise WorkerProtocolError(f"the worker sent a {body} that means nothing: {error}") from None
    if isinstance(decoded, WorkerCapacity):
        _check_capacity(decoded)
    return decoded


def _check_capacity(capacity: WorkerCapacity) -> None:
    for name in _CAPACITY_COUNTS:
        if getattr(capacity, name) < 1:
            raise WorkerProtocolError(f"the worker is ready with {name} 0")
    if capacity.num_host_blocks and not 0 < capacity.swap_bandwidth < math.inf:
        raise WorkerProtocolError(f"the worker is ready with host blocks and swap_bandwidth {capacity.swap_bandwidth}")
