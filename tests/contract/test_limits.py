"""Limits of the system that are too low for a command: one line that names them, and no lines of gRPC's."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagewire.cli import command
from pagewire.common import limits

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


def test_enough_threads_need_no_word() -> None:
    before = threading.active_count()
    assert limits.obstacle() == ""
    assert threading.active_count() == before


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


def test_memory_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lack(arguments: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(command, "load", lambda verb: lack)
    assert command.main(["status"]) == command.FAILURE
    assert capsys.readouterr().err == "pagewire: error: out of memory\n"
