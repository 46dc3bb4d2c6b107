"""Plans and results survive the wire: core dataclass -> proto bytes -> worker dataclass, and back."""

import math
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.core import plan as core
from scheduler_service.core.scheduler import WorkerProtocolError
from scheduler_service.rpc.worker import wire as scheduler_wire
from worker_service import step
from worker_service.rpc import wire as worker_wire

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
COUNTS = st.one_of(st.integers(0, 300), UINT32)
FLOATS = st.floats(width=32, allow_nan=False)


def columns(values: st.SearchStrategy, max_size: int = 8) -> st.SearchStrategy:
    return st.lists(values, max_size=max_size).map(tuple)


SAMPLING = st.builds(
    core.SamplingParams,
    temperature=FLOATS,
    top_k=UINT32,
    top_p=FLOATS,
    min_p=FLOATS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    logit_bias_token_ids=columns(UINT32),
    logit_bias_values=columns(FLOATS),
    min_tokens=UINT32,
    stop_token_ids=columns(UINT32),
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    num_candidates=st.none() | st.integers(1, 40),
)
OPENINGS = st.builds(
    core.RowOpening,
    slot=COUNTS,
    sequence_id=UINT64,
    token_ids=columns(UINT32, 40),
    num_prompt_tokens=COUNTS,
    num_computed_tokens=COUNTS,
    block_ids=columns(UINT32, 40),
    sampling=SAMPLING,
    seed=UINT64,
    sample_index=COUNTS,
)
PLANS = st.builds(
    core.StepPlan,
    epoch=UINT64,
    step=UINT64,
    openings=columns(OPENINGS, 3),
    **{
        field.name: columns(UINT32)
        for field in fields(core.StepPlan)
        if field.name not in ("epoch", "step", "openings")
    },
)
LOGPROBS = st.just(step.Logprobs()) | st.builds(
    step.Logprobs,
    chosen=st.lists(FLOATS, min_size=1, max_size=8).map(tuple),
    ranks=columns(UINT32),
    top_token_ids=columns(UINT32),
    top_logprobs=columns(FLOATS),
)
RESULTS = st.builds(
    step.StepResult,
    epoch=UINT64,
    step=UINT64,
    statuses=columns(st.sampled_from(step.RowStatus)),
    token_ids=columns(UINT32, 40),
    logprobs=LOGPROBS,
    candidates=st.just(step.Candidates())
    | st.builds(
        step.Candidates, token_ids=st.lists(UINT32, min_size=1, max_size=8).map(tuple), logprobs=columns(FLOATS)
    ),
    prompt_logprobs=columns(st.builds(step.PromptLogprobs, slot=COUNTS, first_position=COUNTS, logprobs=LOGPROBS), 3),
    duration_us=UINT64,
    last_moved_step=UINT64,
    parts=st.builds(step.StepParts, **{field.name: UINT32 for field in fields(step.StepParts)}),
)
READY = st.builds(
    step.Ready,
    worker_id=st.text(max_size=5),
    model_digest=st.binary(max_size=32),
    vocab_size=st.integers(1, 2**32 - 1),
    max_model_len=st.integers(1, 2**32 - 1),
    block_size=st.integers(1, 2**32 - 1),
    num_device_blocks=st.integers(1, 2**32 - 1),
    block_bytes=UINT64,
    max_num_seqs=st.integers(1, 2**32 - 1),
    max_num_batched_tokens=st.integers(1, 2**32 - 1),
    device=st.text(max_size=5),
    dtype=st.text(max_size=5),
    attention_backend=st.text(max_size=5),
    num_host_blocks=UINT32,
    swap_bandwidth=st.floats(1e-3, 1e15),
    sliding_window=UINT32,
    tensor_parallel_rank=UINT32,
    tensor_parallel_size=st.integers(1, 2**32 - 1),
)


def plain(value: object) -> object:
    """Both services' dataclasses as dictionaries; each has an enum of its own, so that the numbers are compared."""
    plain_fields = asdict(value)  # type: ignore[call-overload]
    if "statuses" in plain_fields:
        plain_fields["statuses"] = tuple(status.value for status in plain_fields["statuses"])
        if "parts" in plain_fields:  # the scheduler has no names for them
            plain_fields["parts_us"] = tuple(plain_fields.pop("parts").values())
    return plain_fields


def to_scheduler(message: object) -> object:
    data = worker_wire.encode_response(message).SerializeToString()
    return scheduler_wire.decode_worker_message(worker_pb2.ExecuteResponse.FromString(data))


@given(PLANS)
@settings(max_examples=150, deadline=None)
def test_plans(plan: core.StepPlan) -> None:
    data = scheduler_wire.encode_plan(plan).SerializeToString()
    received = worker_wire.decode_request(worker_pb2.ExecuteRequest.FromString(data))
    assert isinstance(received, step.StepPlan)
    assert plain(received) == plain(plan)


@given(RESULTS)
@settings(max_examples=150, deadline=None)
def test_results(result: step.StepResult) -> None:
    received = to_scheduler(result)
    assert isinstance(received, core.StepResult)
    assert plain(received) == plain(result)


@given(READY)
@settings(max_examples=50, deadline=None)
def test_ready(ready: step.Ready) -> None:
    received = to_scheduler(ready)
    assert isinstance(received, core.WorkerCapacity)
    assert plain(received) == plain(ready)


@given(st.integers(0, 2**32 - 1), st.text(max_size=20), UINT64, st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_hello(counter: int, instance_id: str, epoch: int, depth: int) -> None:
    data = scheduler_wire.encode_hello(instance_id, epoch, depth).SerializeToString()
    received = worker_wire.decode_request(worker_pb2.ExecuteRequest.FromString(data))
    assert received == step.Hello(scheduler_wire.PROTOCOL_VERSION, instance_id, epoch, depth)


def test_refusal_and_heartbeat() -> None:
    refusal = to_scheduler(step.Refusal(step.RefusalReason.STALE_EPOCH, 7, "other", "no"))
    assert refusal == scheduler_wire.Refusal(scheduler_wire.RefusalReason.STALE_EPOCH, 7, "other", "no")
    assert to_scheduler(step.Heartbeat(7, 4, 3, 2)) == scheduler_wire.Heartbeat(7, 4, 3, 2)


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
        worker_pb2.ExecuteResponse(ready=worker_pb2.Ready()),
    ],
)
def test_what_the_protocol_does_not_know_is_an_error(message: worker_pb2.ExecuteResponse) -> None:
    with pytest.raises(WorkerProtocolError):
        scheduler_wire.decode_worker_message(worker_pb2.ExecuteResponse.FromString(message.SerializeToString()))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_host_blocks_need_a_bandwidth(bandwidth: float) -> None:
    ready = step.Ready("w", b"d", 1, 1, 1, 1, 1, 1, 1, "", "", "", num_host_blocks=1, swap_bandwidth=bandwidth)
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
