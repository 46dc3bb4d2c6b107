"""`--record` of a scheduler service, and `pagewire replay` in a separate process."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest

from pagewire.cli.replay import main
from pagewire.common.wire.messages import SamplingParams, WorkerCapacity
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving.recording import Recorder, record
from testing.core.recorded_history import RecordedHistory
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import make_checkpoint, request, serve
from tests.contract.service_process import service


def replay(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagewire", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A short recording that was made without a service."""
    path = tmp_path / "recording"
    RecordedHistory(path, seed=1).run(150)
    return path


async def test_what_a_service_did_is_replayed_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    async with serve(make_checkpoint(tmp_path / "model"), record=str(path), max_num_seqs=4) as stack:
        prompts = [[7] * 20 + [i] for i in range(6)]
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(stack.generate(request(prompt, max_tokens=20, n=2)))
        await stack.worker.kill()
        surviving = asyncio.create_task(stack.generate(request([1, 2, 3], max_tokens=12)))
        await stack.worker.start()
        await surviving
        call = stack.stub.Generate(request([4, 5, 6], max_tokens=200))
        await call.read()
        call.cancel()
        await stack.until_idle()
    result = replay(path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("replayed without a difference: ")
    num_tokens = int(result.stdout.split(" tokens")[0].split()[-1])
    assert num_tokens >= 6 * 2 * 20 + 12
    summary = dict(re.split("  +", line, maxsplit=1) for line in result.stdout.splitlines()[1:])
    assert list(summary) == ["recorded", "requests", "ended", "tokens", "KV cache", "preempted", "waiting"]
    assert summary["requests"].startswith("8, at most 4 running and ")
    assert summary["ended"] == "13 length, 1 abort"
    assert f"{num_tokens} output" in summary["tokens"]
    assert "% of the time, it waits for rows" in summary["waiting"]
    shares = [int(share) for share in re.findall(r"(\d+)%", summary["waiting"])]
    assert 0 < sum(shares) <= 100 + len(shares)
    names = {json.loads(line)[0] for line in path.read_text().splitlines()[1:]}
    assert {"add", "abort", "schedule", "complete", "worker_joined", "worker_lost"} <= names


def test_the_reasons_of_a_queue_are_summed_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From 2 s to 8 s, one request has the only row and three of ten blocks. Then the worker is lost until 10 s."""
    options = SchedulerOptions(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)
    recorder = Recorder(str(tmp_path / "recording"), options)
    recorder.open()
    scheduler = record(Scheduler(options), recorder)
    first, second = (Request(name, "", (1,) * 8, SamplingParams(), 4) for name in ("first", "second"))
    scheduler.worker_joined(WorkerCapacity("w", b"", 300, 64, 4, 10, 1, 1, 16, "cpu", "float32", "torch"), 1, 0.0)
    scheduler.add(first, 0.0)
    scheduler.schedule(2.0)
    scheduler.add(second, 2.0)
    scheduler.schedule(2.0)
    scheduler.worker_lost(8.0)
    scheduler.abort("", "first", 8.0)
    scheduler.abort("", "second", 10.0)
    recorder.close()
    assert main([str(tmp_path / "recording")]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [re.sub(" +", " ", row) for row in rows] == [
        "recorded 10.0 s, 0.200 steps/s",
        "requests 2, at most 1 running and 2 waiting",
        "ended 2 abort",
        "tokens 8 prompt (0 cached), 0 output, 0.00 output/s",
        "KV cache 18% held on average, 30% at most",
        "preempted 0 times, 0 of them by swapping",
        "waiting the first request in the queue: 60% of the time, it waits for rows, "
        "20% of the time, no worker is connected",
    ]


def test_the_plans_can_be_seen(recording: Path) -> None:
    result = replay(recording, "--plans")
    assert result.returncode == 0
    *plans, last = result.stdout.splitlines()
    assert f"{len(plans)} steps" in last
    assert all(json.loads(plan)["step"] for plan in plans)


def change(path: Path, event: str, index: int, value: object) -> int:
    """Replace a value in the last event with the given name. Return the event's line index."""
    lines = path.read_text().splitlines()
    number = max(i for i, line in enumerate(lines) if line.startswith(f'["{event}"') and not line.endswith(",null]"))
    fields = json.loads(lines[number])
    fields[index] = value
    lines[number] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")
    return number


def test_the_first_plan_that_differs_is_shown(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = change(recording, "schedule", 3, ["0123456789abcdef", {"epoch": 1, "step": 99}])
    assert main([str(recording)]) == 1
    first, expected, actual, count = capsys.readouterr().out.splitlines()
    assert first.startswith(f"event {number} (schedule at ")
    assert expected == 'expected: ["0123456789abcdef",{"epoch":1,"step":99}]'
    assert actual.startswith('actual:   ["')
    assert count.startswith(f"replayed before it without a difference: {number - 1} events, ")


def test_outputs_that_differ_are_shown(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = change(recording, "complete", 3, "0123456789abcdef")
    assert main([str(recording)]) == 1
    out = capsys.readouterr().out
    assert f"event {number} (complete at " in out
    assert 'that is:  {"sequence_ids":[' in out


def test_an_error_that_was_not_there_is_a_difference(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = recording.read_text().splitlines()
    recording.write_text("\n".join([lines[0], '["abort",1.0,["t","r"],"0123456789abcdef"]', ""]))
    assert main([str(recording)]) == 1
    assert """actual:   {"error":"KeyError: ('t', 'r')"}""" in capsys.readouterr().out


def test_a_recording_cut_short(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = recording.read_text()
    num_events = len(text.splitlines()) - 1
    recording.write_text(text[:-5])
    assert main([str(recording)]) == 1
    message = f"the recording ends in the middle of event {num_events}; "
    assert message + f"{num_events - 1} events were replayed without a difference\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "this is not a recording of pagewire"),
        (bytes(range(256)) * 1000, "this is not a recording of pagewire"),
        (b'{"pagewire_recording":', "this is not a recording of pagewire"),
        (b'{"pagewire_recording": 1}\n', "the recording has version 1, but this pagewire replays version 8"),
    ],
)
def test_what_cannot_be_replayed(text: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"pagewire: error: {path}: {message}\n"
    assert captured.out == ""


def test_a_policy_that_does_not_exist_is_named(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_text(recording.read_text().replace('"policy":"', '"policy":"un', 1))
    assert main([str(recording)]) == 2
    assert "choose one of agent, priority, fcfs, fair, deadline" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"pagewire: error: cannot read {tmp_path / 'none'}: No such file or directory\n"


async def test_a_fifo_that_is_not_read_stops_no_scheduler(checkpoint: Path, tmp_path: Path) -> None:
    """The scheduler is not blocked by opening the FIFO, by a full FIFO, or at shutdown."""
    os.mkfifo(tmp_path / "fifo")
    worker = await FakeWorker.started(checkpoint)
    flags = [f"--worker=127.0.0.1:{worker.port}", "--port=0", "--metrics-port=0", f"--record={tmp_path / 'fifo'}"]
    async with (
        service("scheduler", str(checkpoint), *flags) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        for _ in range(40):  # about 2 KiB each
            async with asyncio.timeout(60):
                assert [_ async for _ in stub.Generate(request([7] * 200, max_tokens=20))]
    await worker.kill()


async def test_a_recording_that_cannot_be_made_ends_the_scheduler_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SchedulerConfig(
        model=str(make_checkpoint(tmp_path / "model")), record=str(tmp_path / "missing" / "file"), port=0
    )
    code = await server.run(config, stop=asyncio.Event(), ready=print)
    assert code == 1
    assert "--record" in caplog.text
