"""Encoding of the scheduler's state as messages. Fields with the same name in the record and the message are copied."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.message import Message

from pagewire.common.wire.messages import WorkerCapacity
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc.resolved_request import FRONT_END_PROTOCOL
from scheduler_service.core.request import RequestReport, SchedulerStats
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving.checkpoint.model_info import ModelInfo

# The limits that the scheduler and its worker both have, under the same names. The lower value applies.
WORKERS_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


def encode_server(
    model: ModelInfo,
    *,
    version: str,
    served_model_names: Sequence[str],
    instance_id: str,
    options: SchedulerOptions,
    has_tenants: bool,
) -> scheduler_pb2.GetServerInfoResponse:
    """Return the part of GetServerInfo's answer that stays the same while the scheduler runs, such as the model's
    properties."""
    return scheduler_pb2.GetServerInfoResponse(
        version=version,
        served_model_name=served_model_names[0],
        served_model_aliases=served_model_names[1:],
        instance_id=instance_id,
        **_common(options, scheduler_pb2.GetServerInfoResponse),
        has_tenants=has_tenants,
        front_end_protocol=FRONT_END_PROTOCOL,
        chat_template=model.chat_template,
        named_chat_templates={} if model.template_file is None else model.template_file.named,
        chat_refusals=model.chat_refusals,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=model.tokenizer_path is not None,
        model_digest=model.digest,
        special_tokens=model.special_tokens,
    )


def encode_worker(capacity: WorkerCapacity, epoch: int) -> scheduler_pb2.WorkerInfo:
    """Describe the connected worker for GetServerInfo's answer. `epoch` is the number of the connection to the
    worker."""
    common = _common(capacity, scheduler_pb2.WorkerInfo)
    return scheduler_pb2.WorkerInfo(
        **common, epoch=epoch, sliding_window=capacity.windows[0], layer_group_windows=capacity.windows
    )


def encode_loads(stats: SchedulerStats, **others: Any) -> scheduler_pb2.GetLoadsResponse:
    """Encode the statistics of the scheduler core, and other fields of the message, as GetLoads' answer."""
    return scheduler_pb2.GetLoadsResponse(**_common(stats, scheduler_pb2.GetLoadsResponse), **others)


def decode_stats(loads: scheduler_pb2.GetLoadsResponse) -> SchedulerStats:
    """Decode the statistics of the scheduler core from GetLoads' answer. This is the inverse of `encode_loads`."""
    values = {field.name: getattr(loads, field.name) for field in fields(SchedulerStats)}
    columns: dict[str, Any] = {name: tuple(value) for name, value in values.items() if not isinstance(value, int)}
    return SchedulerStats(**values | columns)


def encode_report(report: RequestReport, now: float) -> scheduler_pb2.GetRequestResponse:
    """Encode the state of one request as GetRequest's answer. `now` is the current time in seconds, on the same clock
    as the times in the report."""
    same = _common(report, scheduler_pb2.GetRequestResponse)
    same["state"] = scheduler_pb2.RequestState.Value(f"REQUEST_STATE_{report.state.upper()}")
    same["holders"] = [{"request_id": holder.request_id, "num_blocks": holder.num_blocks} for holder in report.holders]
    return scheduler_pb2.GetRequestResponse(**same, age_seconds=now - report.arrived_at)


def _common(record: Any, message: type[Message]) -> dict[str, Any]:
    """Return the fields of a dataclass that also exist in a type of protobuf message, as a mapping from name to
    value."""
    names = message.DESCRIPTOR.fields_by_name
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name in names}
