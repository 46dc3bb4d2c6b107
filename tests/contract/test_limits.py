"""System limits that are too low for a command: one line names them, and gRPC prints no lines of its own."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagewire.cli import command
from pagewire.common.process import limits

ROOT = Path(__file__).parents[2]


def test_threads_that_cannot_be_started_name_the_limits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, started = threading.Thread.start, []

    def start_five(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_five)
    assert command.main(["status"]) == command.FAILURE
    assert capsys.readouterr().err == (
        "pagewire: error: only 5 of 8 threads can be started; raise the limit of processes (ulimit -u), "
        "or a container's (pids.max) or a service's (TasksMax)\n"
    )
    assert not any(thread.is_alive() for thread in started)


def test_enough_threads_need_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def record(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", record)
    assert limits.obstacle() == ""
    assert len(started) == limits.NUM_THREADS
    assert not any(thread.is_alive() for thread in started)


def test_informational_commands_need_no_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "obstacle", lambda **_: "few threads")
    for arguments in (["status", "--help"], ["completion", "bash"]):
        assert command.main(arguments) == command.SUCCESS
    assert capsys.readouterr().err == ""


def test_a_folder_that_was_removed_is_one_line_of_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A removed working directory is reported in one line, because libraries that torch loads by path cannot be found
    from there.
    """
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert command.main(["worker", "storyteller"]) == command.FAILURE
    line = "pagewire: error: the working directory was removed: change to one that exists\n"
    assert capsys.readouterr().err == line
    assert limits.obstacle() == ""


@pytest.mark.parametrize("mebibytes", [200, 600])
def test_little_address_space_is_one_line(mebibytes: int) -> None:
    program = f'ulimit -v {mebibytes * 1024} && exec "$@"'
    full = ["sh", "-c", program, "sh", sys.executable, "-m", "pagewire", "complete", "--server", "127.0.0.1:1", "hi"]
    done = subprocess.run(full, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == command.FAILURE
    assert done.stderr == (
        "pagewire: error: 640 MiB of address space are needed; "
        f"the address space is limited to {mebibytes} MiB (ulimit -v)\n"
    )


@pytest.mark.parametrize("verb", ["status", "scheduler"])
def test_memory_that_a_limit_keeps_is_one_line(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a limit on memory, the error is a fault of the service or the machine, and keeps its traceback."""

    def lack(arguments: list[str]) -> int:
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setattr(command, "load", lambda verb: lack)
    monkeypatch.setattr(command, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert command.main([verb]) == command.FAILURE
    assert capsys.readouterr().err == (
        "pagewire: error: out of memory: Unable to allocate 3 GiB; "
        "the address space is limited to 1024 MiB (ulimit -v)\n"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    with pytest.raises(MemoryError):
        command.main([verb])
