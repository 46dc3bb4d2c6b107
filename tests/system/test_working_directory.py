"""Our processes run no files of the working directory, which may have the name of any module."""

import os
import signal
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pagewire.client.errors import StartError
from pagewire.hosting.local_server import LocalServer
from pagewire.hosting.supervisor import free_port
from testing.services import ENVIRON, HOST

MODEL = Path(__file__).parents[2] / "models" / "storyteller"
# The modules that Python has loaded before the first line of a module that it runs.
LOADED = "import runpy, sys; print(*sys.modules)"
OURS = ("pagewire", "scheduler_service", "worker_service")
PROCESSES = ("pagewire worker", "pagewire frontend", "pagewire.common.grammars.trial")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder with a file for each module that might be imported; each file writes its name to `executed`."""
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout.split()
    installed = {name for name in packages_distributions() if name.isidentifier()}
    for name in {*sys.stdlib_module_names, *installed, *OURS} - {*loaded, "pagewire"}:
        (tmp_path / f"{name}.py").write_text(f"print({name!r}, file=open({str(tmp_path / 'executed')!r}, 'a'))\n")
    return tmp_path


def command_lines(group: list[int]) -> list[str]:
    """Return the command lines of processes and their descendants."""
    lines = []
    for pid in group:
        lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        tasks = Path(f"/proc/{pid}/task").iterdir()
        lines += command_lines([int(child) for task in tasks for child in (task / "children").read_text().split()])
    return lines


@pytest.mark.thorough
def test_no_process_of_a_server_runs_files_of_the_working_directory(hostile: Path) -> None:
    flags = ["--port=0", "--metrics-port=0", "--tensor-parallel-size=2", "--num-device-blocks=64"]
    flags += [f"--http-port={free_port(HOST)}", "--log-level=warning"]
    command = [sys.executable, "-m", "pagewire", "serve", str(MODEL), *flags]
    with subprocess.Popen(command, cwd=hostile, env=ENVIRON, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = [process.stdout.readline().split("://")[0] for _ in range(2)]
        running = " ".join(command_lines([process.pid]))
        process.send_signal(signal.SIGTERM)
    assert ready == ["ready on grpc", "ready on http"]
    assert [running.count(name) for name in PROCESSES] == [2, 1, 1]
    assert not (hostile / "executed").exists(), (hostile / "executed").read_text()
    assert process.returncode == 0


def test_a_server_of_a_program_runs_no_files_of_the_working_directory(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends once it has read its options, because the model does not exist."""
    (hostile / "pagewire.py").write_text((hostile / "random.py").read_text())
    monkeypatch.chdir(hostile)
    monkeypatch.setitem(os.environ, "PYTHONPATH", ENVIRON["PYTHONPATH"])
    with pytest.raises(StartError, match=r"absent"):
        LocalServer(str(hostile / "absent"), flags_only=()).start()
    assert not (hostile / "executed").exists(), (hostile / "executed").read_text()
