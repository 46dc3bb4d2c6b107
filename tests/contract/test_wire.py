"""Messages between scheduler and worker survive encoding: dataclass -> proto bytes -> an equal dataclass."""

import math
from dataclasses import replace
from random import Random
from typing import Any, get_args

import pytest

from pagewire.common.wire.messages import (
    PHASES,
    LayerGroup,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerProtocolError,
)
from pagewire.common.wire.worker_wire import (
    FromScheduler,
    Response,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from tests.contract.drawn_data import drawn_data

seeds = pytest.mark.parametrize("seed", range(40))


def to_scheduler(message: Any) -> object:
    return decode_response(worker_pb2.ExecuteResponse.FromString(encode_response(message).SerializeToString()))


def to_worker(message: Any) -> object:
    return decode_request(worker_pb2.ExecuteRequest.FromString(encode_request(message).SerializeToString()))


def drawn(data_type: type[Any], seed: int) -> Any:
    """Return a random instance. With an even seed no field has its default value, with an odd seed about half of them
    do.
    """
    print(f"seed {seed}")
    return drawn_data(data_type, getattr(worker_pb2, data_type.__name__), Random(seed), 0.5 * (seed % 2))


@seeds
@pytest.mark.parametrize("data_type", get_args(FromScheduler))
def test_messages_of_the_scheduler_survive_encoding(data_type: type, seed: int) -> None:
    said = drawn(data_type, seed)
    assert to_worker(said) == said


def _by_reach(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """Return the layer groups in the order in which a worker reports them. There is at least one."""
    return tuple(sorted(groups, key=lambda group: -(group.sliding_window or math.inf))) or (LayerGroup(),)


@pytest.mark.parametrize("groups", [(), (LayerGroup(8), LayerGroup()), (LayerGroup(8), LayerGroup(9))])
def test_layer_groups_are_ordered_by_reach(groups: tuple[LayerGroup, ...]) -> None:
    ready = WorkerCapacity("w", b"d", 1, 1, 1, 1, 1, 1, 1, "", "", "", layer_groups=groups)
    with pytest.raises(WorkerProtocolError, match="invalid layer_groups"):
        to_scheduler(ready)


@seeds
@pytest.mark.parametrize("data_type", get_args(Response))
def test_messages_of_the_worker_survive_encoding(data_type: type, seed: int) -> None:
    said = drawn(data_type, seed)
    if isinstance(said, WorkerCapacity):
        said = replace(said, layer_groups=_by_reach(said.layer_groups))
        if not said.swap_bandwidth:
            said = replace(said, num_host_blocks=0)  # host blocks require a bandwidth
    assert to_scheduler(said) == said


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
        decode_response(worker_pb2.ExecuteResponse.FromString(message.SerializeToString()))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_host_blocks_need_a_bandwidth(bandwidth: float) -> None:
    ready = WorkerCapacity("w", b"d", 1, 1, 1, 1, 1, 1, 1, "", "", "", num_host_blocks=1, swap_bandwidth=bandwidth)
    with pytest.raises(WorkerProtocolError, match="swap_bandwidth"):
        to_scheduler(ready)
    assert to_scheduler(replace(ready, num_host_blocks=0, swap_bandwidth=0.0))


COUNTS = ("vocab_size", "max_model_len", "block_size", "num_device_blocks", "max_num_seqs", "max_num_batched_tokens")


@pytest.mark.parametrize("name", [*COUNTS, "tensor_parallel_size"])
def test_a_worker_without_capacity_is_refused(name: str) -> None:
    ready = WorkerCapacity("w", b"d", 1, 1, 1, 1, 1, 1, 1, "", "", "")
    with pytest.raises(WorkerProtocolError, match=f"reports an invalid {name}: 0"):
        to_scheduler(replace(ready, **{name: 0}))


def test_every_column_of_a_plan_has_its_phase() -> None:
    """Each column of a plan belongs to one phase.

    A column's name begins with its phase, so no other list of columns is needed.
    """
    columns = [name for name in StepPlan.__slots__[2:] if name not in ("num_leased_steps", "ends_lease")]
    assert [name for names in PHASES.values() for name in names] == columns
    assert PHASES["set_blocks"] == ("set_block_tables", "set_block_indexes", "set_block_ids")
    assert PHASES["openings"] == ("openings",)


def test_absent_columns_cost_no_byte() -> None:
    assert encode_request(StepPlan(1, 1)).plan.ByteSize() == 4
    assert encode_response(StepResult(1, 1)).result.ByteSize() == 4


def test_a_plan_of_256_decoding_rows_is_small() -> None:
    advancing = StepPlan(
        epoch=2**61, step=100_000, append_tables=tuple(range(16)), append_block_ids=tuple(range(60_000, 60_016))
    )
    assert len(encode_request(advancing).SerializeToString()) < 2000
