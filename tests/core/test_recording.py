"""Recordings of the core's events: their content, and that the recorder never blocks serving."""

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pagewire.cli.replay import main
from pagewire.common.wire.messages import Logprobs, PromptLogprobs, SamplingParams, StepResult
from pagewire.options import options_of
from scheduler_service.core.request import EndReason, Request, SequenceEnd, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving import recording
from scheduler_service.serving.recording import (
    EVENTS,
    CutShortError,
    Recorder,
    RecordingError,
    RecordingReader,
    encode,
    record,
)
from testing.core.recorded_history import DEFAULTS, RecordedHistory
from tests.thorough import thorough


def recorded(path: Path, seed: int = 0, num_events: int = 400) -> RecordedHistory:
    history = RecordedHistory(path, seed)
    history.run(num_events)
    return history


def request(name: str = "r") -> Request:
    return Request(name, "t", (1, 2, 3), SamplingParams(), 4)


def opened(path: Path) -> Recorder:
    recorder = Recorder(str(path), DEFAULTS)
    recorder.open()
    return recorder


def lines(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("seed", [*range(8), *thorough(*range(8, 30))])
def test_a_random_history_is_replayed_to_the_same_plans(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"seed {seed}")
    path = tmp_path / "recording"
    history = recorded(path, seed)
    assert main([str(path)]) == 0, capsys.readouterr().out
    num_events = len(path.read_text().splitlines()) - 1
    counts = f"{num_events} events, {history.num_plans} steps, {history.num_tokens} tokens in "
    assert f"replayed without a difference: {counts}" in capsys.readouterr().out
    assert history.num_tokens > 100


def test_an_output_that_ends_in_another_way_differs() -> None:
    end = SequenceEnd(1, EndReason.STOP, 3, 0, 4, None, "", 0.0, 1.0, 2.0)
    ends = [[], [end], [replace(end, reason=EndReason.LENGTH)], [replace(end, stop_token_id=7)]]
    digests = {recording._outputs_digest(TokenOutputs([1], [5], ended=ended)) for ended in ends}
    assert len(digests) == len(ends)


def test_events_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    history = recorded(path, num_events=1000)
    with path.open() as file:
        reader = RecordingReader(file)
        assert reader.options == history.options
        events = list(reader.events())
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert [event.arguments[0] for event in events if event.name == "add"] == history.requests
    assert events[-1].now == history.now
    assert {event.name for event in events} >= EVENTS.keys() - {"flush_cache"}
    assert any("AdmissionError" in str(event.outcome) for event in events) or history.num_refused == 0


def test_the_tokens_of_openings_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorded(path)
    plans = [told[1] for name, _, _, told in lines(path)[1:] if name == "schedule" and told is not None]
    openings = [opening for plan in plans for opening in plan.get("openings", ())]
    assert openings
    assert all(isinstance(opening["token_ids"], int) for opening in openings)


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    opened(tmp_path / "recording").close()
    assert (tmp_path / "recording").stat().st_mode & 0o777 == 0o600


def test_an_older_recording_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text("older")
    opened(path).close()
    assert (tmp_path / "recording.old").read_text() == "older"


def test_a_file_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"--record .*/recording cannot be written: No such file or directory"):
        opened(tmp_path / "missing" / "recording")


def test_events_reach_the_file_within_a_second_of_events_and_when_all_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = opened(path)
    scheduler = record(Scheduler(DEFAULTS), recorder)
    scheduler.add(request(), 10.0)
    for now in (10.2, 10.4):
        assert scheduler.schedule(now) is None
    assert recorder.is_written_within(20)
    num_lines = len(lines(path))
    scheduler.schedule(11.5)
    assert recorder.is_written_within(20)
    assert len(lines(path)) == 5 > num_lines
    scheduler.abort("t", "r", 11.6)
    assert recorder.is_written_within(20)
    assert len(lines(path)) == 6
    recorder.close()


def test_exceptions_are_recorded_and_reraised(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = opened(path)
    scheduler = record(Scheduler(DEFAULTS), recorder)
    with pytest.raises(KeyError):
        scheduler.abort("t", "unknown", 1.0)
    assert recorder.is_written_within(20)
    assert lines(path)[1] == ["abort", 1.0, ["t", "unknown"], {"error": "KeyError: ('t', 'unknown')"}]


def test_a_full_disk_ends_the_recording_with_one_error_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    recorder = opened(Path("/dev/null"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._descriptor)
    os.close(full)
    scheduler = record(Scheduler(DEFAULTS), recorder)
    with caplog.at_level(logging.ERROR):
        assert len(scheduler.add(request("a"), 100.0)) == 1
        assert recorder.is_written_within(20)
        assert len(scheduler.add(request("b"), 200.0)) == 1
        assert not recorder.is_open
        assert len(scheduler.add(request("c"), 300.0)) == 1
        recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the recording /dev/null ends here, serving goes on: [Errno 28] No space left on device"
    ]


def test_a_file_that_takes_no_bytes_ends_the_recording_where_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 20_000)
    monkeypatch.setattr(recording, "_CLOSE_TIMEOUT", 0.01)
    os.mkfifo(tmp_path / "fifo")
    history = RecordedHistory(tmp_path / "fifo", seed=3)
    history.run(2000)  # without a reader, the FIFO holds 64 KiB
    assert "/fifo ends here, serving goes on: its file accepted no bytes while 0 MiB arrived" in caplog.text
    text = read_to_the_end_of_a_line(tmp_path / "fifo", "missing_events")
    *_, last = text.splitlines()
    (tmp_path / "recording").write_text(text)
    num_events = len(text.splitlines()) - 2
    assert num_events > 100
    assert main([str(tmp_path / "recording")]) == 1
    missing = f"{json.loads(last)['missing_events']} events or more are missing from event {num_events + 1} on"
    replayed = f"{num_events} events were replayed without a difference"
    assert capsys.readouterr().out == f"{missing}, because they could not be written in time; {replayed}\n"


def test_the_last_events_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "_CLOSE_TIMEOUT", 0.01)
    os.mkfifo(tmp_path / "fifo")
    RecordedHistory(tmp_path / "fifo", seed=3).run(2000)
    assert "/fifo lacks its last events: its file accepts no bytes" in caplog.text


def read_to_the_end_of_a_line(path: Path, word: str) -> str:
    text = ""
    with path.open() as file:
        while word not in text:
            text += file.readline()
    return text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "this is not a recording of pagewire"),
        ("hello\n", "this is not a recording of pagewire"),
        ("[1]\n", "this is not a recording of pagewire"),
        ("{}\n", "this is not a recording of pagewire"),
        ('{"pagewire_recording": 0}\n', "the recording has version 0, but this pagewire replays version 8"),
        ('{"pagewire_recording": 8}\n', "the recording's header is damaged"),
        ('{"pagewire_recording": 8, "scheduler": {"max_size": 1}}\n', "the recording's header is damaged"),
    ],
)
def test_invalid_recordings_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text(text)
    with path.open() as file, pytest.raises(RecordingError, match=reason):
        RecordingReader(file)


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "{}",
        '["jump", 1.0, [], null]',
        '["abort", 1.0, ["t"], null]',
        '["abort", 1.0, ["t", 5], null]',
        '["schedule", "now", [], null]',
        '["add", 1.0, [{"request_id": "r"}], null]',
        '["add", 1.0, [{"colour": "r"}], null]',
    ],
)
def test_a_damaged_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "recording"
    opened(path).close()
    path.write_text(path.read_text() + line + "\n")
    with path.open() as file, pytest.raises(RecordingError, match="line 2 of the recording is damaged"):
        list(RecordingReader(file).events())


def test_an_end_in_the_middle_of_an_event(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorded(path, num_events=20)
    path.write_text(path.read_text()[:-1])
    num_lines = len(path.read_text().splitlines())
    with path.open() as file, pytest.raises(CutShortError) as error:
        list(RecordingReader(file).events())
    assert error.value.number == num_lines - 1


def test_its_header_has_every_option_of_the_core(tmp_path: Path) -> None:
    opened(tmp_path / "recording").close()
    [header] = lines(tmp_path / "recording")
    assert header["scheduler"].keys() == {*options_of(SchedulerOptions), "grammar_version"}


def test_infinities_and_nan_survive_json() -> None:
    """A worker may report tokens with probability 0 and positions that it did not compute, as infinities and NaN."""
    logprobs = Logprobs((-0.5,), (1,), (7, 8, 9), (-0.5, -math.inf, math.inf))
    result = StepResult(1, 2, logprobs=logprobs, prompt_logprobs=(PromptLogprobs(0, 1, Logprobs((math.nan,), (0,))),))
    text = encode(("complete", -math.inf, [result], {"error": "-Infinity"}))
    name, now, (encoded,), outcome = json.loads(text, parse_constant=pytest.fail)
    assert (name, recording._decode(float, now), outcome) == ("complete", -math.inf, {"error": "-Infinity"})
    read = recording._decode(StepResult, encoded)
    assert repr(read) == repr(result), "a NaN equals nothing"
