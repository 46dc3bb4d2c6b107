"""`pagewire worker --profile N`: one trace of N steps, recorded by torch's profiler."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagewire import AsyncClient, SamplingParams
from testing import services
from testing.checkpoints.families import make_checkpoint
from testing.plans import PlannedStep, Row, plan_steps
from worker_service.config import WorkerConfig
from worker_service.runner.profile import NUM_STEPS_BEFORE, STEP_PREFIX, StepProfile
from worker_service.startup.loader import load_worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("profile") / "model", "qwen3", seed=1)


def planned(num_steps: int) -> list[PlannedStep]:
    return plan_steps([Row([5, 6, 7], num_steps)], block_size=16, max_num_batched_tokens=64)


def launched_steps(trace: Path) -> list[int]:
    """Return the steps of the marks in a trace, in order."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [event for event in events if event.get("name", "").startswith(STEP_PREFIX) and event["ph"] == "X"]
    return [int(mark["name"].removeprefix(STEP_PREFIX)) for mark in sorted(marks, key=lambda mark: mark["ts"])]


def test_the_steps_behind_the_first_ones_are_traced_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_worker(WorkerConfig(model=str(model), device="cpu", num_device_blocks=100), "worker")
    profile = StepProfile(4, tmp_path / "traces")
    steps, profiled = planned(80), []
    loaded.runner.reset(1, lambda report: None)
    with caplog.at_level(logging.INFO):
        for step in steps:
            with profile.around_launch(step.plan):
                launched = loaded.runner.launch(step.plan)
            profiled.append(launched.result().token_ids)
    (trace,) = (tmp_path / "traces").glob("pagewire-worker-*.trace.json")
    assert f"wrote a trace of 4 steps to {trace}" in caplog.text
    assert launched_steps(trace) == [NUM_STEPS_BEFORE + 1 + step for step in range(4)]
    assert "aten::" in trace.read_text()
    loaded.runner.reset(2)
    plain = [loaded.runner.launch(step.plan).result().token_ids for step in steps]
    assert profiled == plain


def test_a_directory_that_cannot_be_made_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--profile-dir is .*file/traces"):
        StepProfile(4, tmp_path / "file" / "traces")


async def test_a_worker_says_where_its_trace_is_and_when_there_is_none(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def start(arguments: Sequence[str]) -> services.Process:
        command = [sys.executable, "-m", "pagewire", *arguments]
        with log.open("a") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=services.ENVIRON)

    async def serve(num_tokens: int) -> str:
        log.write_text("")
        worker = ["--num-device-blocks", 64, "--profile", 6, "--profile-dir", tmp_path / "traces"]
        with services.running(model, start=start, worker=[*worker, "--log-level", "info"]) as system:
            async with AsyncClient(system.url) as client:
                sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
                await client.complete(None, sampling, prompt_token_ids=[1, 2, 3])
        return log.read_text()

    assert re.search(r"WARNING .*no trace was written, because the worker stopped \d+ steps too early", await serve(5))
    assert not list((tmp_path / "traces").iterdir())
    (path,) = re.findall(r"wrote a trace of 6 steps to (\S+)", await serve(60))
    assert len(launched_steps(Path(path))) == 6
