"""The core's data to and from `pagewire.worker.v1`: pure translation."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.core.plan import (
    PART_NAMES,
    Candidates,
    Logprobs,
    PromptLogprobs,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from scheduler_service.core.scheduler import WorkerProtocolError

PROTOCOL_VERSION = 3


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


WorkerMessage = WorkerCapacity | Refusal | StepResult | Heartbeat


def encode_hello(instance_id: str, epoch: int, pipeline_depth: int) -> worker_pb2.ExecuteRequest:
    hello = worker_pb2.Hello(
        protocol_version=PROTOCOL_VERSION, instance_id=instance_id, epoch=epoch, pipeline_depth=pipeline_depth
    )
    return worker_pb2.ExecuteRequest(hello=hello)


def encode_plan(plan: StepPlan) -> worker_pb2.ExecuteRequest:
    return worker_pb2.ExecuteRequest(
        plan=worker_pb2.StepPlan(
            epoch=plan.epoch,
            step=plan.step,
            released_slots=plan.released_slots,
            swap_out_device_blocks=plan.swap_out_device_blocks,
            swap_out_host_blocks=plan.swap_out_host_blocks,
            swap_in_host_blocks=plan.swap_in_host_blocks,
            swap_in_device_blocks=plan.swap_in_device_blocks,
            copy_source_blocks=plan.copy_source_blocks,
            copy_target_blocks=plan.copy_target_blocks,
            openings=[_encode_opening(opening) for opening in plan.openings],
            fork_source_slots=plan.fork_source_slots,
            fork_target_slots=plan.fork_target_slots,
            append_slots=plan.append_slots,
            append_block_ids=plan.append_block_ids,
            set_block_slots=plan.set_block_slots,
            set_block_indexes=plan.set_block_indexes,
            set_block_ids=plan.set_block_ids,
            append_token_slots=plan.append_token_slots,
            append_token_ids=plan.append_token_ids,
            work_slots=plan.work_slots,
            work_num_tokens=plan.work_num_tokens,
        )
    )


def decode_worker_message(message: worker_pb2.ExecuteResponse) -> WorkerMessage:
    """Raises WorkerProtocolError for anything that the worker should not have sent."""
    _refuse_unknown_fields(message)
    body = message.WhichOneof("body")
    if body == "result":
        return _decode_result(message.result)
    if body == "heartbeat":
        heartbeat = message.heartbeat
        return Heartbeat(
            heartbeat.epoch, heartbeat.last_started_step, heartbeat.last_finished_step, heartbeat.last_moved_step
        )
    if body == "ready":
        return _decode_ready(message.ready)
    if body == "refusal":
        return _decode_refusal(message.refusal)
    raise WorkerProtocolError("the worker sent a message without a body")


def _encode_opening(opening: RowOpening) -> worker_pb2.RowOpening:
    return worker_pb2.RowOpening(
        slot=opening.slot,
        sequence_id=opening.sequence_id,
        token_ids=opening.token_ids,
        num_prompt_tokens=opening.num_prompt_tokens,
        num_computed_tokens=opening.num_computed_tokens,
        block_ids=opening.block_ids,
        sampling=_encode_sampling(opening.sampling),
        seed=opening.seed,
        sample_index=opening.sample_index,
        traceparent=opening.traceparent,
    )


def _encode_sampling(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_token_ids=sampling.logit_bias_token_ids,
        logit_bias_values=sampling.logit_bias_values,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        num_candidates=sampling.num_candidates,
    )


def _decode_ready(ready: worker_pb2.Ready) -> WorkerCapacity:
    capacity = WorkerCapacity(
        worker_id=ready.worker_id,
        model_digest=ready.model_digest,
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        block_size=ready.block_size,
        num_device_blocks=ready.num_device_blocks,
        block_bytes=ready.block_bytes,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        device=ready.device,
        dtype=ready.dtype,
        attention_backend=ready.attention_backend,
        num_host_blocks=ready.num_host_blocks,
        swap_bandwidth=ready.swap_bandwidth,
        sliding_window=ready.sliding_window,
        tensor_parallel_rank=ready.tensor_parallel_rank,
        tensor_parallel_size=ready.tensor_parallel_size,
    )
    for name in _CAPACITY_COUNTS:
        if getattr(capacity, name) < 1:
            raise WorkerProtocolError(f"the worker is ready with {name} 0")
    if capacity.num_host_blocks and not 0 < capacity.swap_bandwidth < math.inf:
        raise WorkerProtocolError(f"the worker is ready with host blocks and swap_bandwidth {capacity.swap_bandwidth}")
    return capacity


_CAPACITY_COUNTS = (
    "vocab_size",
    "max_model_len",
    "block_size",
    "num_device_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
)


def _decode_refusal(refusal: worker_pb2.Refusal) -> Refusal:
    try:
        reason = RefusalReason(refusal.reason)
    except ValueError:
        raise WorkerProtocolError(f"the worker refused for the unknown reason {refusal.reason}") from None
    return Refusal(reason, refusal.epoch, refusal.instance_id, refusal.message)


_read_parts = attrgetter(*PART_NAMES)
_NO_LOGPROBS, _NO_CANDIDATES = Logprobs(), Candidates()


def _decode_result(result: worker_pb2.StepResult) -> StepResult:
    try:
        statuses = tuple(RowStatus(status) for status in result.statuses)
    except ValueError:
        raise WorkerProtocolError(f"step {result.step}: an unknown row status in {list(result.statuses)}") from None
    return StepResult(
        epoch=result.epoch,
        step=result.step,
        statuses=statuses,
        token_ids=tuple(result.token_ids),
        logprobs=_decode_logprobs(result.logprobs) if result.HasField("logprobs") else _NO_LOGPROBS,
        candidates=_decode_candidates(result.candidates) if result.HasField("candidates") else _NO_CANDIDATES,
        prompt_logprobs=tuple(
            PromptLogprobs(entry.slot, entry.first_position, _decode_logprobs(entry.logprobs))
            for entry in result.prompt_logprobs
        ),
        duration_us=result.duration_us,
        last_moved_step=result.last_moved_step,
        parts_us=_read_parts(result.parts),
    )


def _decode_logprobs(logprobs: worker_pb2.Logprobs) -> Logprobs:
    return Logprobs(
        chosen=tuple(logprobs.chosen),
        ranks=tuple(logprobs.ranks),
        top_token_ids=tuple(logprobs.top_token_ids),
        top_logprobs=tuple(logprobs.top_logprobs),
    )


def _decode_candidates(candidates: worker_pb2.Candidates) -> Candidates:
    return Candidates(tuple(candidates.token_ids), tuple(candidates.logprobs))


def _refuse_unknown_fields(message: Message) -> None:
    if len(UnknownFieldSet(message)):
        numbers = sorted({field.field_number for field in UnknownFieldSet(message)})
        raise WorkerProtocolError(f"the worker sent unknown fields {numbers} in {message.DESCRIPTOR.full_name}")
    for nested in _nested_messages(message):
        _refuse_unknown_fields(nested)


def _nested_messages(message: Message) -> Iterator[Message]:
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            nested: Iterable[Message] = (value,) if isinstance(value, Message) else value
            yield from nested
