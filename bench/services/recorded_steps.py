"""Reading the steps of a recording (`pagewire scheduler --record FILE`), and fitting a modelled worker's rates to
them."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_service.serving.recording import Event, RecordingReader
from scheduler_service.simulation.trace_worker import WorkerSpeed


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The work of a step, and the seconds that the scheduler waited for this step alone."""

    num_prompt_tokens: int
    num_decoding_rows: int
    seconds: float


@dataclass(slots=True)
class _Row:
    """A row of the worker: the tokens until it samples, whether it has sampled, and its tokens in each step."""

    num_left: int
    has_sampled: bool
    work: int = 0


def read_steps(path: Path) -> list[RecordedStep]:
    """Return the steps of a recording without forks, beams and swaps. Raises the exceptions of `RecordingReader`."""
    with path.open(encoding="ascii") as file:
        return list(_steps(RecordingReader(file).events()))


def fit(steps: Sequence[RecordedStep], max_num_batched_tokens: int) -> WorkerSpeed:
    """Fit rates to steps: by least squares to steps with prefill, and by the mean to steps that only decode.

    Raises ValueError if there are too few steps of either kind.
    """
    prompts = [step for step in steps if step.num_prompt_tokens]
    decodes = [step.seconds for step in steps if step.num_decoding_rows and not step.num_prompt_tokens]
    if len(prompts) < 2 or not decodes:
        raise ValueError(
            f"{len(prompts)} steps compute prompts and {len(decodes)} only decode: a fit needs at least 2 and 1"
        )
    slope, intercept = statistics.linear_regression(
        [step.num_prompt_tokens for step in prompts], [step.seconds for step in prompts]
    )
    if slope <= 0:
        raise ValueError("steps with more prompt tokens did not take longer, so that no rate can be fitted")
    return WorkerSpeed(
        prefill_rate=1 / slope,
        decode_rate=1 / statistics.fmean(decodes),
        transfer_rate=1.0,
        scale=1,
        step_overhead_s=max(0.0, intercept),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _steps(events: Iterable[Event]) -> Iterable[RecordedStep]:
    """Yield the steps of the events. Two steps are in flight at a time.

    A step begins when it is planned, but not before the end of the previous step.
    """
    rows: dict[int, _Row] = {}
    under_way: dict[int, tuple[float, int, int]] = {}  # planned at, prompt tokens, decoding rows
    last_end = 0.0
    for event in events:
        if event.name == "schedule" and isinstance(event.outcome, list):
            plan = event.outcome[1]
            under_way[plan["step"]] = (event.now, *_compute(rows, plan))
        elif event.name == "complete":
            planned_at, num_prompt_tokens, num_decoding_rows = under_way.pop(event.arguments[0].step)
            yield RecordedStep(num_prompt_tokens, num_decoding_rows, event.now - max(planned_at, last_end))
            last_end = event.now


def _compute(rows: dict[int, _Row], plan: dict[str, Any]) -> tuple[int, int]:
    """Apply a plan to the rows. Return its prompt tokens, including recomputed tokens, and its decoding rows."""
    for slot in plan.get("released_slots", ()):
        del rows[slot]
    for opening in plan.get("openings", ()):
        num_tokens = opening["token_ids"]
        num_left = num_tokens - opening.get("num_computed_tokens", 0)
        rows[opening["slot"]] = _Row(num_left, num_tokens > opening["num_prompt_tokens"])
    for slot, num_tokens in zip(plan.get("work_slots", ()), plan.get("work_num_tokens", ()), strict=True):
        rows[slot].work = num_tokens
    num_prompt_tokens = num_decoding_rows = 0
    for row in rows.values():
        if row.num_left == 1 and row.has_sampled:
            num_decoding_rows += row.work
        else:
            num_prompt_tokens += row.work
        row.num_left -= row.work
        if not row.num_left:
            row.num_left = row.work = 1
            row.has_sampled = True
    return num_prompt_tokens, num_decoding_rows
