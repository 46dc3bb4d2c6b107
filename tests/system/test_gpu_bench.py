"""`make gpu-bench`, rehearsed on a CPU with a tiny model: the evaluation of traces and results."""

import json
from pathlib import Path

import pytest

from bench.checkpoint import GPU_SHAPES
from bench.gpu import speed
from bench.gpu.measurements import IDLE, ON_GPU, PEER, REHEARSAL, THROUGHPUT, decode_name
from bench.gpu.results_page import COMPILED, OURS, PRODUCTS
from bench.gpu.speed import GOALS, judge
from bench.gpu.step_trace import STEP_PREFIX, KernelRow, step_table, step_times

pytestmark = pytest.mark.thorough


def test_a_rehearsal_measures_without_judging(tmp_path: Path) -> None:
    output = tmp_path / "gpu_speed.json"
    parts = ["decode_small", "throughput", "swap", "idle", "serving_small", "peer_steps_small", "step_tables_small"]
    assert speed.main(["--device", "cpu", "--output", str(output), "--parts", *parts]) == 0
    found = json.loads(output.read_text())
    assert list(found["parts"]) == parts
    steps = found["parts"]["decode_small"]["results"]
    assert [step["name"] for step in steps] == [decode_name("tiny", batch) for batch in REHEARSAL.small_batches]
    assert all(step["step_seconds"] > 0 for step in steps)
    (served,) = found["parts"]["throughput"]["results"]
    assert len(served["rounds"]) == REHEARSAL.num_rounds
    assert served["num_output_tokens"] > 8 * 10
    copies, alone, beside = found["parts"]["swap"]["results"]
    assert "cuda" in copies["unavailable"]
    assert alone["bytes"] >= REHEARSAL.swap_bytes
    assert beside["step_seconds_beside_moves"] > 0
    for part in ("idle", "step_tables_small"):
        (traced,) = found["parts"][part]["results"]
        assert "none of a GPU" in traced["unavailable"]
    for streams in found["parts"]["serving_small"]["results"]:
        assert 0 < streams["first_token_p50"] <= streams["first_token_p99"]
        assert 0 < streams["gap_p50"] <= streams["gap_p99"]
    (beside,) = found["parts"]["peer_steps_small"]["results"]
    assert list(beside["rounds"]) == [OURS, COMPILED, PRODUCTS]
    assert all(len(times) == REHEARSAL.num_rounds and min(times) > 0 for times in beside["rounds"].values())
    assert [(goal["value"], goal["is_met"]) for goal in found["goals"]] == [(None, None)] * len(GOALS)


def test_goals_are_judged_on_a_gpu_where_all_they_need_is_there() -> None:
    results = {
        decode_name("Qwen3-0.6B", 1): {"step_seconds": 0.00119},
        decode_name("Qwen3-8B", 256): {"step_seconds": 0.0186},
        THROUGHPUT: {"tokens_per_s": 21_000.0},
        IDLE: {"idle_share": 0.05},
    }
    judged = {judgement.name: judgement for judgement in judge(results, is_gpu=True)}
    assert {name: judgement.is_met for name, judgement in judged.items() if judgement.value is not None} == {
        "decode step, Qwen3-0.6B shape, batch 1, 1k context": True,
        "decode step, Qwen3-8B shape, batch 256, 1k context": False,
        THROUGHPUT: True,
        "device idle between decoding steps at depth 2, batch 64": False,
    }
    ratio = f"{THROUGHPUT}, beside transformers generate_batch"
    assert judged[ratio].is_met is None
    with_peer = judge({**results, PEER: {"times_as_fast": 4.2}}, is_gpu=True)
    (judgement,) = [judgement for judgement in with_peer if judgement.name == ratio]
    assert (judgement.value, judgement.is_met) == (pytest.approx(4.2), True)
    assert judgement.goal == "at least 4 times"


def test_every_goal_is_about_something_that_is_measured() -> None:
    """If all cases exist, every goal has a value."""
    shapes = [(ON_GPU.small, ON_GPU.small_batches), (ON_GPU.large, ON_GPU.large_batches)]
    names = [decode_name(shape, batch) for shape, batches in shapes for batch in batches]
    assert all(shape in GPU_SHAPES for shape, _ in shapes)
    every = dict.fromkeys(
        ("step_seconds", "tokens_per_s", "times_as_fast", "idle_share", "bytes_per_s", "slowdown"), 1.0
    )
    others = (THROUGHPUT, PEER, IDLE, *(speed.PINNED_COPY, speed.SWAP, speed.SWAP_BESIDE_DECODE))
    judged = judge(dict.fromkeys([*names, *others], every), is_gpu=True)
    assert all(judgement.value is not None for judgement in judged)


class Trace:
    """A profiler's trace of steps: launched on thread 1, executed on stream 7."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def step(
        self, number: int, launched_at: float, operations: list[tuple[float, float, int]], name: str = "k"
    ) -> None:
        """Add a step. `operations`: operations on the device as (start, end, stream), in microseconds."""
        mark = {"ph": "X", "cat": "user_annotation", "name": f"{STEP_PREFIX}{number}", "tid": 1}
        self.events.append({**mark, "ts": launched_at, "dur": 10.0})
        for start, end, stream in operations:
            correlation = len(self.events)
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": launched_at + 1}
            self.events.append({**call, "dur": 1.0, "args": {"correlation": correlation}})
            operation = {"ph": "X", "cat": "kernel", "name": name, "tid": stream, "ts": start, "dur": end - start}
            self.events.append({**operation, "args": {"correlation": correlation, "stream": stream}})

    @property
    def trace(self) -> dict:
        return {"traceEvents": [{"ph": "M", "name": "process_name"}, *self.events]}

    def times(self):
        return step_times(self.trace)


def test_idle_time_is_what_lies_between_steps_on_their_stream() -> None:
    """Gaps within a step belong to the step, and copies on another stream do not count."""
    trace = Trace()
    trace.step(1, 0, [(100, 150, 7), (160, 200, 7), (200, 230, 13)])
    trace.step(2, 50, [(210, 260, 7), (262, 300, 7), (301, 340, 13)])
    trace.step(3, 210, [(330, 400, 7)])
    times = trace.times()
    assert times.num_steps == 3
    assert times.total == pytest.approx(300e-6)
    assert times.idle_between == pytest.approx(40e-6)


def test_a_table_has_the_kernels_gaps_and_launches_of_a_step() -> None:
    """Copies on another stream are not part of the kernels, gaps or launches."""
    trace = Trace()
    trace.step(1, 0, [(100, 150, 7), (160, 200, 7), (200, 230, 13)], name="product")
    trace.step(2, 50, [(210, 250, 7), (252, 300, 7)], name="product")
    trace.step(3, 210, [(330, 402, 7)], name="attention")
    table = step_table(trace.trace)
    assert table.num_steps == 3
    assert table.span == pytest.approx((100 + 90 + 72) / 3)
    assert table.gaps == pytest.approx((10 + 2) / 3)
    assert table.launches == pytest.approx(5 / 3)
    assert table.kernels == (
        KernelRow("product", pytest.approx(4 / 3), pytest.approx(178 / 3)),
        KernelRow("attention", pytest.approx(1 / 3), pytest.approx(72 / 3)),
    )


def test_a_trace_without_steps_is_refused() -> None:
    trace = Trace()
    trace.step(1, 0, [])
    with pytest.raises(ValueError, match="0 steps on a device and 1 launched steps"):
        trace.times()
