"""Spans of the worker's rows, as they arrive at a collector."""

import asyncio
import time
from dataclasses import replace

import pytest

from pagewire.common.wire.messages import StepPlan
from testing.plans import Row, plan_steps
from testing.trace_collector import attributes, collecting
from worker_service.config import WorkerConfig
from worker_service.engine.tracing import StepTracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def traced(plan: StepPlan, *, slots: tuple[int, ...]) -> StepPlan:
    """Return the plan with a traceparent for the rows that are allocated in these slots."""
    openings = [
        replace(opening, traceparent=TRACEPARENT) if opening.slot in slots else opening for opening in plan.openings
    ]
    return replace(plan, openings=tuple(openings))


async def spans_of(plans: list[StepPlan]) -> list[tuple[str, dict[str, object]]]:
    """Return names and attributes of the steps' spans, in the order of their starts, after checking their times."""
    began = time.time_ns()
    async with collecting() as (collector, endpoint):
        tracing = StepTracing(endpoint, version="1")
        for plan in plans:
            tracing.step_done(plan, time.time_ns())
        await asyncio.to_thread(tracing.close)  # the collector runs on this loop
        ended = time.time_ns()
    assert {span.trace_id.hex() for span in collector.spans} <= {TRACE_ID}
    assert {span.parent_span_id.hex() for span in collector.spans} <= {PARENT_ID}
    spans = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    for span in spans:
        assert began <= span.start_time_unix_nano <= span.end_time_unix_nano <= ended
    assert "pagewire-worker" in collector.resources or not spans
    return [(span.name, attributes(span)) for span in spans]


def span(name: str, sequence_id: int, first: int, last: int, epoch: int = 1) -> tuple[str, dict[str, object]]:
    expected = {
        "pagewire.sequence_id": sequence_id,
        "pagewire.epoch": epoch,
        "pagewire.first_step": first,
        "pagewire.last_step": last,
    }
    return name, expected


async def test_a_row_prefills_in_chunks_and_decodes_until_its_slot_is_released() -> None:
    steps = plan_steps([Row(range(20), 4)], block_size=4, max_num_batched_tokens=8)
    plans = [traced(step.plan, slots=(0,)) for step in steps]
    assert len(plans) == 6
    released = StepPlan(epoch=1, step=7, released_slots=(0,))
    later = StepPlan(epoch=1, step=8)
    assert await spans_of([*plans, released, later]) == [
        span("execute prefill", 0, 1, 3),
        span("execute decode", 0, 4, 6),
    ]


async def test_a_row_of_one_token_never_decodes() -> None:
    steps = plan_steps([Row(range(5), 1), Row(range(5), 3)], block_size=4, max_num_batched_tokens=64)
    plans = [traced(step.plan, slots=(0,)) for step in steps]
    assert await spans_of(plans) == [span("execute prefill", 0, 1, 1)]


async def test_the_end_of_an_epoch_ends_what_ran_and_the_next_begins_anew() -> None:
    steps = plan_steps([Row(range(5), 9)], block_size=4, max_num_batched_tokens=64)
    first = [traced(step.plan, slots=(0,)) for step in steps[:4]]
    again = [replace(traced(step.plan, slots=(0,)), epoch=2) for step in steps[:2]]
    assert await spans_of([*first, *again]) == [
        span("execute prefill", 0, 1, 1),
        span("execute decode", 0, 2, 4),
        span("execute prefill", 0, 1, 1, epoch=2),
        span("execute decode", 0, 2, 2, epoch=2),
    ]


async def test_rows_that_are_not_traced_leave_nothing() -> None:
    steps = plan_steps([Row(range(5), 3)], block_size=4, max_num_batched_tokens=64)
    assert await spans_of([step.plan for step in steps]) == []


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://x"])
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
        WorkerConfig(model="x", otlp_traces_endpoint=endpoint).validate()
