"""The server that a process starts for itself, whatever the server prints. Short Python programs replace the server."""

import io
import signal
import sys
import threading
from pathlib import Path

import pytest

from pagewire.client.errors import CommandError, StartError, Unavailable
from pagewire.common.process.queued_writer import QueuedWriter
from pagewire.hosting import local_server
from pagewire.hosting.local_server import LocalServer

TALKATIVE = r"""
import signal, sys
out, err = sys.stdout.buffer, sys.stderr.buffer
out.write(b"x" * 200_000 + b"\n" + bytes(range(256)) * 300 + b"\nready on http://a-front-end\n")
err.write(b"\xff" * 300_000 + b"\n" * 100_000)
out.write(b"ready on grpc://127.0.0.1:1\n" + b"y" * 300_000)
out.flush()
err.write(b"z" * 3_000_000)
signal.pause()
"""
FAILING = r"""
import sys
sys.stdout.buffer.write(b"x" * 200_000 + b"\ncannot start: for want of a reason\n")
sys.exit(78)
"""
READY = """
print("ready on grpc://127.0.0.1:1", flush=True)
signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(program: str) -> LocalServer:
        path = tmp_path / "server.py"
        path.write_text(program)
        monkeypatch.setattr(local_server, "python_command", lambda *arguments: [sys.executable, "-S", str(path)])
        return LocalServer("model", flags_only=())

    return make


class Stuck(io.StringIO):
    """A standard error whose writes block until `let_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait()
        return super().write(text)


def test_a_blocked_standard_error_does_not_block_the_server(run, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    monkeypatch.setattr(sys, "stderr", stuck)
    monkeypatch.setattr(local_server, "_FLUSH_TIMEOUT_S", 0.01)
    server = run(TALKATIVE)
    try:
        assert server.start() == "grpc://127.0.0.1:1"
    finally:
        server.stop()
        stuck.let_go.set()
        # Otherwise later lines would go to the standard error of the tests.
        assert server._errors.flush(60)
    assert stuck.getvalue()
    assert server.exit == "signal SIGTERM"


def test_a_partial_line_is_not_counted_as_dropped(run) -> None:
    taken, let_go = threading.Event(), threading.Event()

    def write(block: bytes) -> None:
        taken.set()
        let_go.wait()

    server = run(READY)
    server._errors = QueuedWriter(write, local_server._dropped_notice, max_waiting_bytes=1)
    server._pass_on(["is being written"])
    taken.wait()
    server._pass_on(["waits"])
    server._pass_on([])
    assert server._errors.num_dropped == 0
    server._pass_on(["is dropped"])
    assert server._errors.num_dropped == 1
    let_go.set()
    server._errors.close()


def test_what_it_says_instead_of_its_url_is_the_reason(run) -> None:
    with pytest.raises(StartError, match=r"^for want of a reason$"):
        run(FAILING).start()


def test_what_it_wrote_before_it_ended_is_told_once(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("import sys; sys.exit('2026-11-26 10:00:00,000 CRITICAL pagewire: the port is taken')")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(CommandError, match=r"^pagewire serve model ended with exit code 1$"):
        local_server.serving("model", flags_only=()).__enter__()
    started, reason = capsys.readouterr().err.splitlines()
    assert started == "starting pagewire serve model"
    assert reason.endswith("the port is taken")


def test_no_line_stands_within_another(run, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    server = run("import signal, sys; print('half', end='', file=sys.stderr, flush=True)\n" + READY)
    server.start()
    server.tell("ready")
    server.stop()
    assert errors.getvalue() == "ready\nhalf\n"


@pytest.mark.parametrize("ends", [False, True])
def test_a_call_fails_for_the_end_of_the_server(run, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    run("import os, signal\n" + (READY.replace("signal.pause()", "os.kill(os.getpid(), 9)") if ends else READY))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(local_server, "END_TIMEOUT_S", 20.0 if ends else 0.01)
    expected, said = (
        (CommandError, "^pagewire serve model ended with signal SIGKILL$") if ends else (Unavailable, "^x$")
    )
    with pytest.raises(expected, match=said), local_server.serving("model", flags_only=()):
        raise Unavailable("x")
