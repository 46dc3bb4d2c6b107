"""Plans and results survive the wire: core dataclass -> proto bytes -> worker dataclass, and back."""

import math
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from random import Random
from typing import Any, get_args

import pytest

from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.core import plan as core
from scheduler_service.core.scheduler import WorkerProtocolError
from scheduler_service.rpc.worker import wire as scheduler_wire
from tests.contract.drawn_data import drawn_data
from worker_service import step
from worker_service.rpc import wire as worker_wire

seeds = pytest.mark.parametrize("seed", range(40))


def plain(value: Any) -> Any:
    """Both services' dataclasses as dictionaries; each has enums of its own, so that the names are compared."""

    def as_dictionary(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: bare(item) for name, item in items}

    def bare(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(bare, item))
        return item.name if isinstance(item, Enum) else item

    return asdict(value, dict_factory=as_dictionary)


def to_scheduler(message: Any) -> object:
    data = worker_wire.encode_response(message).SerializeToString()
    return scheduler_wire.decode_worker_message(worker_pb2.ExecuteResponse.FromString(data))


def to_worker(message: worker_pb2.ExecuteRequest) -> object:
    return worker_wire.decode_request(worker_pb2.ExecuteRequest.FromString(message.SerializeToString()))


def drawn(data_type: type[Any], message_type: type[Any], seed: int) -> Any:
    """With even seeds every field is set to something else than its default, with odd ones half of them are."""
    print(f"seed {seed}")
    return drawn_data(data_type, message_type, Random(seed), 0.5 * (seed % 2))


@seeds
def test_plans(seed: int) -> None:
    plan = drawn(core.StepPlan, worker_pb2.StepPlan, seed)
    received = to_worker(scheduler_wire.encode_plan(plan))
    assert isinstance(received, step.StepPlan)
    assert plain(received) == plain(plan)


@seeds
@pytest.mark.parametrize(
    ("data_type", "message_type", "received_type"),
    [
        (step.StepResult, worker_pb2.StepResult, core.StepResult),
        (step.WorkerCapacity, worker_pb2.WorkerCapacity, core.WorkerCapacity),
        (step.Refusal, worker_pb2.Refusal, scheduler_wire.Refusal),
        (step.Heartbeat, worker_pb2.Heartbeat, scheduler_wire.Heartbeat),
    ],
)
def test_what_the_worker_says(data_type: type, message_type: type, received_type: type, seed: int) -> None:
    said = drawn(data_type, message_type, seed)
    if isinstance(said, step.WorkerCapacity) and not said.swap_bandwidth:
        said = replace(said, num_host_blocks=0)  # which need a bandwidth
    received = to_scheduler(said)
    assert isinstance(received, received_type)
    assert plain(received) == plain(said)


@seeds
def test_hello(seed: int) -> None:
    hello = drawn(step.Hello, worker_pb2.Hello, seed)
    message = scheduler_wire.encode_hello(hello.instance_id, hello.epoch, hello.pipeline_depth)
    assert to_worker(message) == replace(hello, protocol_version=scheduler_wire.PROTOCOL_VERSION)


def mirrored(data_type: type) -> dict[str, Any]:
    """Each field's default, and its type: of a dataclass or an enum what that consists of."""
    described: dict[str, Any] = {}
    for field in fields(data_type):
        (inner, *_) = get_args(field.type) or (field.type,)
        if is_dataclass(inner):
            described[field.name] = mirrored(inner)
        elif isinstance(inner, type) and issubclass(inner, Enum):
            described[field.name] = list(inner.__members__)
        else:
            described[field.name] = (field.type, field.default)
    return described


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (core.StepPlan, step.StepPlan),
        (core.StepResult, step.StepResult),
        (core.WorkerCapacity, step.WorkerCapacity),
        (scheduler_wire.Refusal, step.Refusal),
        (scheduler_wire.Heartbeat, step.Heartbeat),
    ],
)
def test_both_services_have_the_same_fields(ours: type, theirs: type) -> None:
    assert mirrored(ours) == mirrored(theirs)
    assert ours.__name__ == theirs.__name__


UNKNOWN = b"\x98\x06\x01"  # field 99


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.ExecuteResponse(heartbeat=worker_pb2.Heartbeat.FromString(UNKNOWN)),
        worker_pb2.ExecuteResponse(result=worker_pb2.StepResult.FromString(UNKNOWN)),
        worker_pb2.ExecuteResponse(
            result=worker_pb2.StepResult(
                prompt_logprobs=[
                    worker_pb2.PromptLogprobs(),
                    worker_pb2.PromptLogprobs(logprobs=worker_pb2.Logprobs.FromString(UNKNOWN)),
                ]
            )
        ),
        worker_pb2.ExecuteResponse.FromString(UNKNOWN),
        worker_pb2.ExecuteResponse(),
        worker_pb2.ExecuteResponse(result=worker_pb2.StepResult(statuses=[9])),
        worker_pb2.ExecuteResponse(result=worker_pb2.StepResult(statuses=[0])),
        worker_pb2.ExecuteResponse(refusal=worker_pb2.Refusal()),
        worker_pb2.ExecuteResponse(ready=worker_pb2.WorkerCapacity()),
    ],
)
def test_what_the_protocol_does_not_know_is_an_error(message: worker_pb2.ExecuteResponse) -> None:
    with pytest.raises(WorkerProtocolError):
        scheduler_wire.decode_worker_message(worker_pb2.ExecuteResponse.FromString(message.SerializeToString()))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_host_blocks_need_a_bandwidth(bandwidth: float) -> None:
    ready = step.WorkerCapacity("w", b"d", 1, 1, 1, 1, 1, 1, 1, "", "", "", num_host_blocks=1, swap_bandwidth=bandwidth)
    with pytest.raises(WorkerProtocolError, match="swap_bandwidth"):
        to_scheduler(ready)
    assert to_scheduler(replace(ready, num_host_blocks=0, swap_bandwidth=0.0))


def test_absent_columns_cost_no_byte() -> None:
    assert scheduler_wire.encode_plan(core.StepPlan(1, 1)).plan.ByteSize() == 4
    assert worker_wire.encode_response(step.StepResult(1, 1)).result.ByteSize() == 4


def test_a_plan_of_256_decoding_rows_is_small() -> None:
    advancing = core.StepPlan(
        epoch=2**61, step=100_000, append_slots=tuple(range(16)), append_block_ids=tuple(range(60_000, 60_016))
    )
    assert len(scheduler_wire.encode_plan(advancing).SerializeToString()) < 2000
