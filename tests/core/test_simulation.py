"""Traces of requests that drive the scheduler core in simulated time."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.command import main
from scheduler_service.core.policy import POLICIES, create_policy
from scheduler_service.simulation.driver import RETENTIONS, SimulatedRun, Simulation, SimulationSettings
from scheduler_service.simulation.report import fairness, figures, summary, table
from scheduler_service.simulation.trace import read_trace
from scheduler_service.simulation.trace_worker import WorkerSpeed
from tests.core.trace_files import BLOCK_SIZE, entry, write_azure, write_mooncake, write_sessions

SPEED = WorkerSpeed(prefill_rate=8000.0, decode_rate=40.0, transfer_rate=100_000.0, scale=16)
RATES = ["--prefill-rate", "8000", "--decode-rate", "40"]


def simulate(path: Path, **settings: Any) -> tuple[SimulatedRun, dict[str, Any]]:
    made = SimulationSettings(**{"pool_tokens": 1_000_000, "speed": SPEED, **settings})
    run = Simulation(read_trace(path), create_policy("fcfs"), made).run()
    return run, figures(run, made)


def times(run: SimulatedRun) -> list[tuple[int, int, float, float, float]]:
    """Return session, request index, arrival, first token and end of each request, in the order of the trace."""
    found = [
        (r.session, r.index, round(r.arrived_at, 6), round(r.first_token_at, 6), round(r.ended_at, 6))
        for r in run.requests
    ]
    return sorted(found)


# Speed


def test_a_step_takes_the_time_of_its_prompts() -> None:
    assert SPEED.step_s(40, 0) == pytest.approx(0.08)
    assert SPEED.step_s(0, 0) == 0.0


def test_a_step_in_which_rows_decode_takes_as_long_as_a_token() -> None:
    assert SPEED.max_step_tokens == 200
    for num_prompt_tokens in (0, 1, 200):
        assert SPEED.step_s(num_prompt_tokens, 7) == pytest.approx(0.4)
    assert SPEED.step_s(300, 1) == pytest.approx(0.6)


def test_rates_are_those_of_the_trace_at_every_scale() -> None:
    for scale in (1, 4, 64):
        speed = WorkerSpeed(8000.0, 40.0, 1000.0, scale)
        assert speed.max_step_tokens == 200
        assert speed.step_s(6400 // scale, 0) == pytest.approx(0.8)
        assert speed.step_s(0, 1) == pytest.approx(scale / 40)
        assert speed.transfer_s(640 // scale) == pytest.approx(0.64)


def test_steps_with_prompts_have_an_overhead_each() -> None:
    speed = WorkerSpeed(8000.0, 40.0, 1000.0, 1, step_overhead_s=0.005)
    assert speed.max_step_tokens == 160
    assert speed.step_s(160, 0) == speed.step_s(160, 1) == pytest.approx(0.025)
    assert speed.step_s(80, 0) == pytest.approx(0.015)
    assert speed.step_s(80, 1) == speed.step_s(0, 1) == pytest.approx(0.025)
    # Two steps of at most 512 tokens, and then tokens at the decode rate.
    limited = WorkerSpeed(8000.0, 40.0, 1000.0, 1, 0.005, max_num_batched_tokens=512)
    assert limited.max_step_tokens == 512
    assert limited.alone_s(800, 5) == pytest.approx(0.1 + 2 * 0.005 + 4 / 40)
    # A simulated step represents 16 steps of the worker. Its overhead is the overhead of the steps that its prompts
    # need.
    scaled = WorkerSpeed(8000.0, 40.0, 1000.0, 16, 0.005, max_num_batched_tokens=512)
    assert scaled.step_s(512, 0) == pytest.approx(16 * limited.step_s(512, 0))
    assert scaled.step_s(50, 0) == pytest.approx(limited.prompt_s(800))


# Times that can be computed by hand


def test_a_session_thinks_between_its_requests(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "trace", [entry(640, 33, [[1, 10]]), entry(1280, 1, [[1, 20]], think_s=5.0)])
    run, found = simulate(path)
    # 640 tokens take 0.08 s including the first token, and 32 more 0.8 s. Then 640 tokens are computed; the others are
    # cached.
    assert times(run) == [(0, 0, 0.0, 0.08, 0.88), (0, 1, 5.88, 5.96, 5.96)]
    assert found["makespan_s"] == pytest.approx(5.96)
    assert found["mean_session_s"] == pytest.approx(5.96)
    assert found["ttft_s"] == pytest.approx(dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 0.08))
    assert found["itl_s"] == pytest.approx(dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 0.025))
    assert (found["computed_tokens"], found["needed_tokens"]) == (1280, 1280)
    assert found["hit_tokens"] == {"device": 640, "host": 0}
    assert found["fairness"] == pytest.approx(1.0)
    assert run.sessions[0].alone_s == pytest.approx(5.96)
    capped, _ = simulate(path, max_think_s=2.0)
    assert times(capped)[1] == (0, 1, 2.88, 2.96, 2.96)


def test_generated_tokens_are_found_in_the_cache(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "trace", [entry(640, 129, [[1, 10]]), entry(1280, 1, [[1, 20]])])
    run, found = simulate(path)
    # All output tokens but the last have been computed and are cached: two blocks.
    assert found["computed_tokens"] == 640 + 512
    assert times(run)[1] == (0, 1, 3.28, 3.344, 3.344)


def test_prompts_are_computed_one_after_another(tmp_path: Path) -> None:
    requests = [entry(3200, 1, [[1, 50]])]
    path = write_sessions(tmp_path / "trace", requests, requests)
    assert times(simulate(path)[0]) == [(0, 0, 0.0, 0.4, 0.4), (1, 0, 0.0, 0.8, 0.8)]
    assert times(simulate(path, max_sessions=1)[0]) == [(0, 0, 0.0, 0.4, 0.4), (1, 0, 0.4, 0.8, 0.8)]


def test_prompts_are_computed_beside_rows_that_decode(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "trace", [entry(3200, 17, [[1, 50]])], [entry(3200, 1, [[1, 50]])])
    run, found = simulate(path)
    # The decoding row uses one of the 200 tokens of the second step. So a third step computes the last token of the
    # prompt.
    assert times(run) == [(0, 0, 0.0, 0.4, 0.8), (1, 0, 0.0, 0.802, 0.802)]
    assert found["itl_s"]["max"] == pytest.approx(0.025)


def test_prompts_are_computed_in_steps_as_large_as_the_servers(tmp_path: Path) -> None:
    path = write_sessions(tmp_path / "trace", [entry(1280, 1, [[1, 20]])], [entry(640, 3, [[1, 10]])])
    speed = WorkerSpeed(8000.0, 40.0, 1000.0, 1, step_overhead_s=0.01, max_num_batched_tokens=1024)
    run, _ = simulate(path, speed=speed)
    # Steps of 1024 and 896 tokens; the first prompt ends in the second step.
    assert times(run) == [(0, 0, 0.0, 0.26, 0.26), (1, 0, 0.0, 0.26, 0.31)]


def test_a_request_that_comes_during_a_step_waits_for_its_end(tmp_path: Path) -> None:
    path = write_mooncake(
        tmp_path / "trace", (0, 3200, 1, list(range(7))), (100, 800, 1, [9, 10]), (2000, 160, 1, [20])
    )
    assert times(simulate(path)[0]) == [(0, 0, 0.0, 0.4, 0.4), (1, 0, 0.1, 0.5, 0.5), (2, 0, 2.0, 2.02, 2.02)]


def test_session_limit_applies_to_timed_arrivals(tmp_path: Path) -> None:
    path = write_mooncake(
        tmp_path / "trace", (0, 3200, 1, list(range(7))), (100, 800, 1, [9, 10]), (2000, 160, 1, [20])
    )
    assert times(simulate(path, max_sessions=1)[0]) == [
        (0, 0, 0.0, 0.4, 0.4),
        (1, 0, 0.4, 0.5, 0.5),
        (2, 0, 2.0, 2.02, 2.02),
    ]


def test_requests_larger_than_the_pool_are_skipped(tmp_path: Path) -> None:
    path = write_sessions(
        tmp_path / "trace", [entry(640, 1, [[1, 10]]), entry(6400, 1, [[1, 100]], 3.0), entry(704, 1, [[1, 11]], 4.0)]
    )
    run, found = simulate(path, pool_tokens=1280)
    assert (found["num_requests"], found["num_rejected"]) == (2, 1)
    assert times(run)[1] == (0, 2, 7.08, 7.088, 7.088)
    assert found["needed_tokens"] == 640 + 0


def growing_sessions(seed: int, num_sessions: int, num_requests: int) -> list[list[dict[str, Any]]]:
    """Return sessions whose prompts grow, and sometimes lose their last blocks."""
    print(f"seed {seed}", file=sys.stderr)
    rng = random.Random(seed)
    sessions = []
    for _ in range(num_sessions):
        runs, requests, last = [[1, rng.randint(10, 40)]], [], 100
        for _ in range(num_requests):
            num_prompt = sum(count for _, count in runs) * BLOCK_SIZE + rng.randrange(BLOCK_SIZE)
            think_s = rng.uniform(0.0, 20.0)
            requests.append(entry(num_prompt, rng.randint(0, 500), [list(run) for run in runs], think_s))
            if rng.random() < 0.2 and runs[-1][1] > 3:
                runs[-1][1] -= 2
            runs.append([last, rng.randint(1, 12)])
            last += 100
        sessions.append(requests)
    return sessions


@pytest.mark.one_of_each
@pytest.mark.parametrize("host_tokens", [0, 50_000])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_and_every_token_accounted_for(tmp_path: Path, policy: str, host_tokens: int) -> None:
    path = write_sessions(tmp_path / "trace", *growing_sessions(1, 6, 8))
    trace = read_trace(path)
    settings = SimulationSettings(20_000, SPEED, host_tokens, max_sessions=4, has_session_tenants=policy == "fair")
    simulation = Simulation(trace, create_policy(policy), settings)
    run = simulation.run(lambda run, now: simulation._scheduler.check())
    found = figures(run, settings)
    assert (found["num_requests"], found["num_rejected"]) == (trace.num_requests, 0)
    assert len(run.sessions) == len(trace.sessions)
    assert found["needed_tokens"] == sum(r.num_needed_tokens for s in trace.sessions for r in s.requests)
    assert sum(run.gaps.values()) == sum(
        round((r.num_output_tokens - 1) / 16) for s in trace.sessions for r in s.requests
    )
    num_prompt_tokens = 16 * sum(round(r.num_prompt_tokens / 16) for s in trace.sessions for r in s.requests)
    assert found["num_preemptions"] == 0
    assert found["computed_tokens"] + sum(found["hit_tokens"].values()) == num_prompt_tokens
    assert (found["hit_tokens"]["host"] > 0) == (host_tokens > 0)


def test_preempted_requests_are_computed_again(tmp_path: Path) -> None:
    requests = [entry(1280, 600, [[1, 20]])]
    path = write_sessions(tmp_path / "trace", requests, requests)
    run, found = simulate(path, pool_tokens=3200)
    assert found["num_preemptions"] == 1
    assert found["computed_tokens"] > found["needed_tokens"] == 2560
    # The wait of the preempted request is one long gap. All other gaps follow from the decode rate.
    assert found["itl_s"]["p50"] == pytest.approx(0.025)
    assert found["itl_s"]["max"] > 1.0
    mean = sum(gap * count for gap, count in run.gaps.items()) / (16 * sum(run.gaps.values()))
    assert found["itl_s"]["mean"] == pytest.approx(mean)


def test_moves_take_their_time(tmp_path: Path) -> None:
    """Content that only the host has is loaded before the request runs."""
    path = write_sessions(
        tmp_path / "trace",
        [entry(6400, 1, [[1, 100]]), entry(6464, 1, [[1, 101]], 100.0)],
        [entry(1280, 817, [[1, 20]])],  # while it decodes, idle blocks are copied to the host
        [entry(64, 1, [[1, 1]]), entry(5120, 1, [[1, 1], [200, 79]], 30.0)],  # replaces these blocks on the device
    )
    run, found = simulate(path, pool_tokens=10_000, host_tokens=100_000)
    [again] = [request for request in run.requests if (request.session, request.index) == (0, 1)]
    num_loaded = found["hit_tokens"]["host"]
    num_computed = found["computed_tokens"] - (6400 + 1280 + 64 + 5056)
    print(num_loaded, num_computed)
    assert num_loaded >= 640
    assert again.first_token_at - again.arrived_at == pytest.approx(num_loaded / 100_000 + num_computed / 8000)


# The report


def test_a_summary_counts_values_by_their_weights() -> None:
    assert summary([]) is None
    found = summary([(5.0, 1), (1.0, 98), (3.0, 1)])
    assert found == {"mean": pytest.approx(1.06), "p50": 1.0, "p95": 1.0, "p99": 3.0, "max": 5.0}


def test_fairness_is_jains_index_of_slowdowns(tmp_path: Path) -> None:
    requests = [entry(3200, 1, [[1, 50]])]
    run, _ = simulate(write_sessions(tmp_path / "trace", requests, requests))
    assert fairness(run) == pytest.approx((1 + 2) ** 2 / (2 * (1 + 4)))
    assert fairness(SimulatedRun()) is None


def test_goodput_counts_first_tokens_within_the_goal(tmp_path: Path) -> None:
    requests = [entry(3200, 1, [[1, 50]])]
    settings = SimulationSettings(1_000_000, SPEED)
    trace = read_trace(write_sessions(tmp_path / "trace", requests, requests))
    found = figures(Simulation(trace, create_policy("fcfs"), settings).run(), settings, ttft_goal_s=0.5)
    assert found["goodput"] == {"ttft_goal_s": 0.5, "requests_per_s": pytest.approx(1 / 0.8), "percent": 50.0}


def test_the_table_has_a_column_for_each_policy(tmp_path: Path) -> None:
    _, found = simulate(write_sessions(tmp_path / "trace", [entry(3200, 1, [[1, 50]])]))
    header, first, *rest = table({"fcfs": found, "fair": found | {"num_requests": 7}}).splitlines()
    assert header.split() == ["fcfs", "fair"]
    assert first.split() == ["requests", "1", "7"]
    assert not any("goodput" in line or "between tokens" in line for line in rest)


# The command


def traces(folder: Path) -> dict[str, Path]:
    return {
        "sessions": write_sessions(folder / "sessions", *growing_sessions(2, 3, 3)),
        "mooncake": write_mooncake(folder / "mooncake", (0, 1100, 5, [0, 1, 2]), (500, 1600, 60, [0, 1, 3, 4])),
        "azure": write_azure(folder / "azure", ("18:15:46.6805900", 374, 44), ("18:15:50.9305900", 396, 109)),
    }


@pytest.mark.parametrize("form", ["sessions", "mooncake", "azure"])
def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    output = tmp_path / "figures.json"
    flags = [
        "--policy",
        "fcfs,fair",
        "--pool-tokens",
        "50000",
        "--sessions",
        "2",
        "--max-think",
        "300",
        "--json",
        str(output),
    ]
    assert main(["simulate", "--trace", str(traces(tmp_path)[form]), *RATES, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].split() == ["fcfs", "fair"]
    found = json.loads(output.read_text(encoding="utf-8"))
    assert list(found) == ["fcfs", "fair"]
    for of_policy in found.values():
        assert of_policy["num_requests"] == (9 if form == "sessions" else 2)
        assert of_policy["makespan_s"] > 0
        assert 0 < of_policy["computed_tokens"] <= 1.1 * of_policy["needed_tokens"]
        assert set(of_policy["ttft_s"]) == set(of_policy["itl_s"]) == {"mean", "p50", "p95", "p99", "max"}


def test_the_command_draws_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = tmp_path / "chart.png"
    flags = ["--pool-tokens", "50000", "--chart", str(chart)]
    assert main(["simulate", "--trace", str(traces(tmp_path)["azure"]), *RATES, *flags]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--policy", "fcsf"], 2, "'fcsf' is none of agent, priority, fcfs"),
        (["--pool-tokens", "0"], 2, "0 is below 1"),
        (["--pool-tokens", "63"], 2, "the pool has 63 tokens, but must hold a block of 64"),
        (["--scale", "24"], 2, "the scale is 24, but must divide the block size, 64"),
        (["--block-size", "240", "--scale", "48"], 2, "the scale is 48, but must divide the trace's block size, 64"),
        (["--decode-rate", "0"], 2, "0 is not above 0"),
        (
            ["--step-overhead", "0.025"],
            2,
            "the step overhead of 0.025 s leaves no time for prompts at a decode rate of 40",
        ),
        (["--max-num-batched-tokens", "0"], 2, "0 is below 1"),
        (["--max-think", "nan"], 2, "'nan' is not a number"),
        (["--json", "no/such/folder/x.json"], 2, "cannot write no/such/folder/x.json"),
        (["--trace", "no-such-file"], 1, "cannot read no-such-file: No such file"),
        (["--trace", "pyproject.toml"], 1, "pyproject.toml is not a trace"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, message: str
) -> None:
    path = str(traces(tmp_path)["sessions"])
    assert main(["simulate", "--trace", path, "--pool-tokens", "50000", *RATES, *flags]) == code
    assert message in capsys.readouterr().err


def test_every_retention_serves_everybody_and_another_is_refused(tmp_path: Path) -> None:
    trace = read_trace(write_sessions(tmp_path / "trace", *growing_sessions(1, 6, 8)))
    computed = {}
    for name in RETENTIONS:
        settings = SimulationSettings(10_000, SPEED, max_sessions=4, max_think_s=5.0, retention=name)
        run = Simulation(trace, create_policy("agent"), settings).run()
        found = figures(run, settings)
        assert found["num_requests"] == trace.num_requests
        assert found["session_tokens"]["kept"] > 0
        computed[name] = found["computed_tokens"]
    assert len(set(computed.values())) > 1
    with pytest.raises(ValueError, match="the retention is 'fifo', but must be one of lru, learned, belady"):
        Simulation(trace, create_policy("agent"), SimulationSettings(20_000, SPEED, retention="fifo"))


def test_no_request_waits_much_longer_than_the_bound(tmp_path: Path) -> None:
    trace = read_trace(write_sessions(tmp_path / "trace", *growing_sessions(2, 12, 8)))
    settings = SimulationSettings(20_000, SPEED, max_sessions=12)
    waits = {}
    for max_wait_s in (1.0, 600.0):
        run = Simulation(trace, create_policy("agent", max_wait_s), settings).run()
        found = figures(run, settings)
        waits[max_wait_s] = found["wait_s"]["max"]
        assert (found["num_overdue"] > 0) == (max_wait_s == 1.0)
    print(waits)
    assert waits[1.0] < waits[600.0]


def test_sessions_are_dealt_to_tenants() -> None:
    settings = SimulationSettings(20_000, SPEED, tenant_shares=(1, 3))
    assert [settings.tenant(session, "s")[-1] for session in range(8)] == list("01110111")
