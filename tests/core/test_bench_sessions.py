"""The service-free parts of the benchmark `sessions`.

These are scaled-down sessions, their texts, and rates fitted to a recording.
"""

import random
import sys
from pathlib import Path

import pytest

from bench.services.recorded_steps import RecordedStep, fit, read_steps
from bench.services.sessions import SessionText, token_of
from bench.services.small_sessions import Reduction, random_session, reduce_session, reduce_sessions, write_sessions
from scheduler_service.core.policy import create_policy
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving.recording import Recorder, record
from scheduler_service.simulation.driver import Simulation, SimulationSettings
from scheduler_service.simulation.trace import common_blocks, num_blocks, read_trace
from scheduler_service.simulation.trace_worker import WorkerSpeed
from tests.core.trace_files import entry

SEED = 5
UNLIMITED = {"max_requests": 100, "max_context": 10**9, "max_output": 10**9, "max_think_s": 10.0**9}


@pytest.mark.parametrize("factor", [1, 4, 64])
def test_small_sessions_keep_order_and_sharing(tmp_path: Path, factor: int) -> None:
    print(f"seed {SEED}", file=sys.stderr)
    sessions = [random_session(f"{SEED}-{number}", 12) for number in range(6)]
    write_sessions(tmp_path / "large", sessions)
    write_sessions(tmp_path / "small", reduce_sessions(sessions, Reduction(factor, **UNLIMITED), 6))
    large, small = read_trace(tmp_path / "large"), read_trace(tmp_path / "small")
    assert (large.block_size, small.block_size) == (64, 64 // factor)
    assert [session.name for session in small.sessions] == [session.name for session in large.sessions]
    num_lost = 0
    for of_large, of_small in zip(large.sessions, small.sessions, strict=True):
        for before, after in zip(of_large.requests, of_small.requests, strict=True):
            assert after.block_runs == before.block_runs
            assert num_blocks(after.block_runs) * small.block_size <= after.num_prompt_tokens
            assert after.num_prompt_tokens == before.num_prompt_tokens // factor
            assert after.num_output_tokens == max(1, round(before.num_output_tokens / factor))
            assert after.think_s == pytest.approx(before.think_s / factor)
            assert abs(after.num_needed_tokens - before.num_needed_tokens / factor) < 1
        pairs = zip(of_small.requests, of_small.requests[1:], strict=False)
        num_lost += sum(common_blocks(a.block_runs, b.block_runs) < num_blocks(a.block_runs) for a, b in pairs)
    assert num_lost  # some prompts lose earlier tokens


def test_sessions_end_before_they_grow_too_long() -> None:
    requests = [
        entry(640, 6400, [[1, 10]], None),
        entry(1280, 64, [[1, 20]], 6400.0),
        entry(6400, 64, [[1, 100]]),
        entry(64, 1, [[1, 1]]),
    ]
    session = {"session": "a", "block_size": 64, "requests": requests}
    reduced = reduce_session(session, Reduction(64, 9, max_context=30, max_output=7, max_think_s=5.0))
    assert reduced["requests"] == [
        {"think_s": 0.0, "input": 10, "output": 7, "blocks": [[1, 10]]},
        {"think_s": 5.0, "input": 20, "output": 1, "blocks": [[1, 20]]},
    ]
    too_long = session | {"session": "b", "requests": requests[2:]}
    found = reduce_sessions([too_long, session, session], Reduction(64, 9, 30, 7, 5.0), 1)
    assert found == [reduced]
    with pytest.raises(ValueError, match="the block size 64 is not a multiple of the factor 48"):
        reduce_session(session, Reduction(48, **UNLIMITED))


def test_a_prompt_shows_what_the_server_wrote() -> None:
    text = SessionText()
    first = text.prompt([1] * 20)
    text.write(20, [2, 2, 3], [1001, 1002, 1003])
    # The second prompt lacks the third token of the output, so this prompt has other content at that position.
    second = text.prompt([1] * 20 + [2, 2, 4])
    assert second[:22] == [*first, 1001, 1002]
    assert second[22] == token_of(4, 22)
    assert text.prompt([1] * 20 + [2]) == second[:21]
    assert first != SessionText().prompt([2] * 20)
    assert 1 <= min(first) <= max(first) < 1024


def test_rates_are_found_again_in_a_recording(tmp_path: Path) -> None:
    print(f"seed {SEED}", file=sys.stderr)
    rng = random.Random(SEED)
    sessions = [
        {"session": f"{number}", "block_size": 64, "requests": [entry(rng.randint(10, 900), rng.randint(1, 9), [])]}
        for number in range(20)
    ]
    write_sessions(tmp_path / "trace", sessions)
    speed = WorkerSpeed(8000.0, 50.0, 1.0, 1, step_overhead_s=0.005, max_num_batched_tokens=512)
    # Sessions run one after another, so that no row decodes beside a prompt.
    settings = SimulationSettings(pool_tokens=6400, speed=speed, max_sessions=1)
    simulation = Simulation(read_trace(tmp_path / "trace"), create_policy("fcfs"), settings)
    recorder = Recorder(str(tmp_path / "recording"), SchedulerOptions(256, 512, 2048, 1, policy="fcfs"))
    recorder.open()
    record(simulation._scheduler, recorder)
    run = simulation.run()
    recorder.close()
    steps = read_steps(tmp_path / "recording")
    assert len(steps) == run.num_steps
    assert sum(step.num_prompt_tokens for step in steps) == run.num_computed_tokens
    outputs = [request["output"] for session in sessions for request in session["requests"]]
    assert sum(step.num_decoding_rows for step in steps) == sum(outputs) - len(outputs)
    fitted = fit(steps, 512)
    assert fitted.prefill_rate == pytest.approx(8000.0)
    assert fitted.decode_rate == pytest.approx(50.0)
    assert fitted.step_overhead_s == pytest.approx(0.005)


def test_nothing_is_fitted_to_too_few_steps() -> None:
    with pytest.raises(ValueError, match="1 steps compute prompts and 0 only decode"):
        fit([RecordedStep(10, 0, 1.0)], 512)
    with pytest.raises(ValueError, match="did not take longer"):
        fit([RecordedStep(10, 0, 1.0), RecordedStep(20, 0, 1.0), RecordedStep(0, 1, 1.0)], 512)
