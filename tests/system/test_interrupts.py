"""Ctrl-C at any moment ends a service, and never with a traceback.

SIGTERM does the same for a service that is the first process of a container.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

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
    """Return the exit code and standard error of a command that gets Ctrl-C after it wrote a line with `part`."""
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
    # The second signal may arrive before the event loop handles signals, while it does, or after it has ended.
    assert code in (0, -signal.SIGINT, *([128 + signal.SIGINT] if times == 2 else []))


NAMESPACE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
# As images and manifests start it.
BLOCKING = ["env", "--block-signal=TERM"]


def first_process(namespace: subprocess.Popen[str]) -> int:
    """Return the first process of a namespace once it runs Python."""
    children = Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children")
    while namespace.poll() is None:
        for child in children.read_text().split():
            if os.readlink(f"/proc/{child}/exe") == os.path.realpath(sys.executable):
                return int(child)
        time.sleep(0.001)  # the kernel reports no event
    raise AssertionError(f"ended with {namespace.returncode}")


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        ("scheduler", ""),
        ("scheduler", " pagewire\n"),
        ("worker", " pagewire.cli.command\n"),
        ("worker", " torch.version\n"),
        ("frontend", " grpc._cython\n"),
        ("scheduler", "options from flags"),
        ("serve", "the worker is process"),
    ],
)
def test_a_containers_first_process_ends_at_sigterm(verb: str, part: str) -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of processes cannot be made here")
    python = [sys.executable, *(["-X", "importtime"] if part.endswith("\n") else []), "-m", "pagewire"]
    command = [*NAMESPACE, *BLOCKING, *python, *VERBS[verb]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stderr is not None
        first = first_process(process)
        seen = part == "" or any(part in line for line in process.stderr)
        os.kill(first, signal.SIGTERM)
        told = process.stderr.read()
        guard.cancel()
    assert seen, f"{part!r} was not written"
    assert "Traceback" not in told, told
    # A service that already handles the signal drains; before that, the signal ends it at once.
    assert process.returncode in (0, 128 + signal.SIGTERM)


def test_images_and_manifests_block_sigterm_until_python_runs() -> None:
    starts = [*ROOT.glob("deploy/Dockerfile.*"), *ROOT.glob("deploy/**/*.yaml")]
    lines = [line.strip() for path in starts for line in path.read_text().splitlines()]
    commands = [line.partition("[")[2] for line in lines if line.startswith(("ENTRYPOINT", "command:"))]
    ours = [command for command in commands if command.startswith('"env", "--block-signal=TERM", "pagewire"')]
    assert len(ours) >= 6
    assert {command for command in commands if "pagewire" in command} == {*ours}
