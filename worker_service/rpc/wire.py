"""Between `pagewire.worker.v1` and `step.py`. Pure translation: values are checked by whoever uses them."""

from dataclasses import fields

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2 as pb
from worker_service.session import ProtocolError
from worker_service.step import (
    Candidates,
    Heartbeat,
    Hello,
    Logprobs,
    PromptLogprobs,
    Ready,
    Refusal,
    RefusalReason,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepParts,
    StepPlan,
    StepResult,
)

_REFUSAL_REASONS = {
    RefusalReason.STALE_EPOCH: pb.Refusal.REASON_STALE_EPOCH,
    RefusalReason.PROTOCOL_VERSION: pb.Refusal.REASON_PROTOCOL_VERSION,
    RefusalReason.FUTURE_EPOCH: pb.Refusal.REASON_FUTURE_EPOCH,
}
_ROW_STATUSES = {
    RowStatus.OK: pb.ROW_STATUS_OK,
    RowStatus.NAN_LOGITS: pb.ROW_STATUS_NAN_LOGITS,
    RowStatus.OUT_OF_MEMORY: pb.ROW_STATUS_OUT_OF_MEMORY,
}


def decode_request(request: pb.ExecuteRequest) -> Hello | StepPlan:
    """Raises ProtocolError for a field that this version does not know, or no body at all."""
    _reject_unknown_fields(request)
    body = request.WhichOneof("body")
    if body == "plan":
        return _decode_plan(request.plan)
    if body == "hello":
        hello = request.hello
        return Hello(hello.protocol_version, hello.instance_id, hello.epoch, hello.pipeline_depth)
    raise ProtocolError("a request has no body")


def encode_response(response: Ready | Refusal | StepResult | Heartbeat) -> pb.ExecuteResponse:
    match response:
        case StepResult():
            return pb.ExecuteResponse(result=_encode_result(response))
        case Heartbeat():
            return pb.ExecuteResponse(heartbeat=_encode_heartbeat(response))
        case Ready():
            return pb.ExecuteResponse(ready=_encode_ready(response))
        case Refusal():
            return pb.ExecuteResponse(refusal=_encode_refusal(response))


def _reject_unknown_fields(message: Message) -> None:
    if len(UnknownFieldSet(message)):
        raise ProtocolError(f"{message.DESCRIPTOR.name} holds a field that this version does not know")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in (value,) if isinstance(value, Message) else value:
                _reject_unknown_fields(part)


def _decode_plan(plan: pb.StepPlan) -> StepPlan:
    return StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        released_slots=tuple(plan.released_slots),
        swap_out_device_blocks=tuple(plan.swap_out_device_blocks),
        swap_out_host_blocks=tuple(plan.swap_out_host_blocks),
        swap_in_host_blocks=tuple(plan.swap_in_host_blocks),
        swap_in_device_blocks=tuple(plan.swap_in_device_blocks),
        copy_source_blocks=tuple(plan.copy_source_blocks),
        copy_target_blocks=tuple(plan.copy_target_blocks),
        openings=tuple(_decode_opening(opening) for opening in plan.openings),
        fork_source_slots=tuple(plan.fork_source_slots),
        fork_target_slots=tuple(plan.fork_target_slots),
        append_slots=tuple(plan.append_slots),
        append_block_ids=tuple(plan.append_block_ids),
        set_block_slots=tuple(plan.set_block_slots),
        set_block_indexes=tuple(plan.set_block_indexes),
        set_block_ids=tuple(plan.set_block_ids),
        append_token_slots=tuple(plan.append_token_slots),
        append_token_ids=tuple(plan.append_token_ids),
        work_slots=tuple(plan.work_slots),
        work_num_tokens=tuple(plan.work_num_tokens),
    )


def _decode_opening(opening: pb.RowOpening) -> RowOpening:
    return RowOpening(
        slot=opening.slot,
        sequence_id=opening.sequence_id,
        token_ids=tuple(opening.token_ids),
        num_prompt_tokens=opening.num_prompt_tokens,
        num_computed_tokens=opening.num_computed_tokens,
        block_ids=tuple(opening.block_ids),
        sampling=_decode_sampling(opening.sampling),
        seed=opening.seed,
        sample_index=opening.sample_index,
        traceparent=opening.traceparent,
    )


def _decode_sampling(sampling: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_token_ids=tuple(sampling.logit_bias_token_ids),
        logit_bias_values=tuple(sampling.logit_bias_values),
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None,
        num_candidates=sampling.num_candidates if sampling.HasField("num_candidates") else None,
    )


_PART_NAMES = tuple(field.name for field in fields(StepParts))


def _encode_result(result: StepResult) -> pb.StepResult:
    return pb.StepResult(
        epoch=result.epoch,
        step=result.step,
        statuses=[_ROW_STATUSES[status] for status in result.statuses],
        token_ids=result.token_ids,
        logprobs=_encode_logprobs(result.logprobs) if result.logprobs.chosen else None,
        candidates=_encode_candidates(result.candidates) if result.candidates.token_ids else None,
        prompt_logprobs=[_encode_prompt_logprobs(chunk) for chunk in result.prompt_logprobs],
        duration_us=result.duration_us,
        last_moved_step=result.last_moved_step,
        parts=_encode_parts(result.parts) if result.parts != StepParts() else None,
    )


def _encode_parts(parts: StepParts) -> pb.StepParts:
    return pb.StepParts(**{name: getattr(parts, name) for name in _PART_NAMES})


def _encode_logprobs(logprobs: Logprobs) -> pb.Logprobs:
    return pb.Logprobs(
        chosen=logprobs.chosen,
        ranks=logprobs.ranks,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def _encode_candidates(candidates: Candidates) -> pb.Candidates:
    return pb.Candidates(token_ids=candidates.token_ids, logprobs=candidates.logprobs)


def _encode_prompt_logprobs(chunk: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        slot=chunk.slot, first_position=chunk.first_position, logprobs=_encode_logprobs(chunk.logprobs)
    )


def _encode_heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        epoch=heartbeat.epoch,
        last_started_step=heartbeat.last_started_step,
        last_finished_step=heartbeat.last_finished_step,
        last_moved_step=heartbeat.last_moved_step,
    )


def _encode_ready(ready: Ready) -> pb.Ready:
    return pb.Ready(
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


def _encode_refusal(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        reason=_REFUSAL_REASONS[refusal.reason],
        epoch=refusal.epoch,
        instance_id=refusal.instance_id,
        message=refusal.message,
    )
