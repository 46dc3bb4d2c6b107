"""Ctrl-C at any moment of a service ends it, and never with a traceback."""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagewire.hosting.supervisor import free_port

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "storyteller")
VERBS = {
    "serve": ["serve", MODEL, "--port=0", "--metrics-port=0"],
    "scheduler": ["scheduler", "--model", MODEL, "--worker=127.0.0.1:1", "--port=0", "--metrics-port=0"],
    "frontend": ["frontend", "--model", MODEL, "--scheduler=127.0.0.1:1", "--port=0"],
    "worker": ["worker", "--model", MODEL, "--port=0"],
    "status": ["status", "--url=grpc://127.0.0.1:1"],
}


def interrupted(command: Sequence[str], part: str, *python_flags: str, times: int = 1) -> tuple[int, str]:
    """The exit code and standard error of a command that gets Ctrl-C when it has written this part of a line."""
    full = [sys.executable, *python_flags, "-m", "pagewire", *command]
    told: list[str] = []
    with subprocess.Popen(full, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if part in line:
                break
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        told.append(process.stderr.read())
        guard.cancel()
    return process.returncode, "".join(told)


@pytest.mark.parametrize("verb", ["serve", "worker", "status"])
@pytest.mark.parametrize("module", ["pagewire.cli.command", "grpc._cython"])
def test_while_it_imports(verb: str, module: str) -> None:
    code, err = interrupted(VERBS[verb], f" {module}\n", "-X", "importtime")
    assert "Traceback" not in err, err[-3000:]
    assert code == -signal.SIGINT


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("verb", "flags", "part"),
    [
        ("serve", [], "the worker is process"),
        ("serve", ["--gateway", f"--gateway-port={free_port('127.0.0.1')}"], "the worker is process"),
        ("serve", ["--log-level=debug"], "worker: ready on"),
        ("scheduler", [], "options from flags"),
        ("scheduler", [], "waiting for the worker"),
        ("frontend", [], "waiting for the scheduler"),
        ("worker", [], "options from flags"),
        ("worker", [], "KV cache"),
    ],
)
def test_while_it_starts(verb: str, flags: list[str], part: str, times: int) -> None:
    code, err = interrupted([*VERBS[verb], *flags], part, times=times)
    for bad in ("Traceback", "ERROR", "Exception ignored"):
        assert bad not in err, err
    # The second may come when the loop has not yet taken over, has, or is gone.
    assert code in (0, -signal.SIGINT, *([128 + signal.SIGINT] if times == 2 else []))
