"""`pagewire run` as a user runs it: the bundled model, served for one chat or one answer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.serving.terminal import CTRL_C, CTRL_D, ChatUser
from testing.terminal import ROOT
from tests.system.processes import command_line, wait_until_gone
from tests.thorough import thorough

MODEL = str(ROOT / "models" / "storyteller")
PROMPT = "Once upon a time"
FLAGS = ("--num-threads=1", "--num-device-blocks=256", "--temperature=0", "--max-tokens=8")


def run(
    *arguments: str, verb: str = "run", told: str = "", folder: Path = ROOT, **variables: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pagewire", verb, *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, cwd=folder, env=environ, input=told, capture_output=True, text=True, check=False)


def server_of(terminal: ChatUser) -> int:
    """Return the process id of the chat's server, a child of the thread that started it."""
    threads = Path(f"/proc/{terminal.process.pid}/task").iterdir()
    (child,) = (child for thread in threads for child in (thread / "children").read_text().split())
    assert f"pagewire serve {MODEL}" in command_line(int(child))
    return int(child)


def test_a_prompt_is_answered_and_the_server_ends() -> None:
    given = run(MODEL, *FLAGS, "--dtype", "float32", PROMPT)
    assert given.returncode == 0, given.stderr
    assert len(given.stdout.split()) > 4
    starting, *progress, ready = given.stderr.splitlines()
    assert all(" WARNING worker_service.startup.progress: " in line for line in progress), (
        "told of a start that is slow"
    )
    assert starting == f"starting pagewire serve {MODEL}"
    assert ready.startswith("ready on grpc://127.0.0.1:")
    piped = run(MODEL, *FLAGS, "--dtype", "float32", verb="chat", told=f"{PROMPT}\n")
    assert (piped.returncode, piped.stdout) == (0, given.stdout)


def test_the_bundled_model_is_found_from_any_folder(tmp_path: Path) -> None:
    given = run("storyteller", *FLAGS, "--stats", PROMPT, folder=tmp_path)
    assert given.returncode == 0, given.stderr
    assert "8 completion tokens" in given.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("is_flag", [False, True])
def test_run_ignores_options_of_another_server(tmp_path: Path, is_flag: bool) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("tenants: /nowhere\ntls-cert: /nowhere\nrecord: /nowhere/at/all\nmax-model-len: 40\n")
    flags = (*FLAGS[:-1], "--ignore-eos", "--stats", *(("--config", str(file)) if is_flag else ()))
    variables = {} if is_flag else {"PAGEWIRE_CONFIG": str(file), "PAGEWIRE_TLS_KEY": "/nowhere"}
    answered = run(MODEL, *flags, PROMPT, **variables)
    assert answered.returncode == 0, answered.stderr
    assert "4 prompt tokens, 0 cached tokens, 36 completion tokens" in answered.stderr


def test_a_chat_ends_with_its_server(tmp_path: Path) -> None:
    with ChatUser(tmp_path, "run", MODEL, *FLAGS) as terminal:
        terminal.expect("ready on ")
        terminal.ask(PROMPT)
        terminal.expect("> ")
        terminal.type("more\r")
        terminal.expect("> ")
        server = server_of(terminal)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    wait_until_gone(server)
    assert (tmp_path / "pagewire" / "chat_history").read_text() == f"{PROMPT}\nmore\n"


@pytest.mark.parametrize("moment", ["answering", *thorough("asked")])
def test_a_chat_ends_when_its_server_is_killed(tmp_path: Path, moment: str) -> None:
    with ChatUser(tmp_path, "run", MODEL, *FLAGS[:-1], "--max-tokens=2000", "--ignore-eos") as terminal:
        terminal.expect("Ctrl-D ends.")
        if moment == "answering":
            terminal.ask(PROMPT)
            terminal.expect(" the ")
        os.kill(server_of(terminal), signal.SIGKILL)
        if moment == "asked":
            terminal.ask(PROMPT)
        shown = terminal.expect(f"pagewire: error: pagewire serve {MODEL} ended with signal SIGKILL\r\n")
        assert "error:" not in shown
        assert terminal.wait() == 1


@pytest.mark.parametrize("moment", ["answering", *thorough("loading", "asked")])
def test_sigterm_ends_both(tmp_path: Path, moment: str) -> None:
    with ChatUser(tmp_path, "run", MODEL, *FLAGS[:-1], "--max-tokens=2000", "--ignore-eos") as terminal:
        terminal.expect("starting pagewire serve")
        if moment != "loading":
            terminal.expect("Ctrl-D ends.")
            server = server_of(terminal)
        if moment == "answering":
            terminal.ask(PROMPT)
            terminal.expect(" the ")
        elif moment == "asked":
            terminal.expect("> ")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
    if moment != "loading":
        wait_until_gone(server)


def test_ctrl_c_while_it_loads_ends_both(tmp_path: Path) -> None:
    with ChatUser(tmp_path, "run", MODEL, *FLAGS) as terminal:
        terminal.expect("starting pagewire serve")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130


def test_bad_model_is_reported() -> None:
    failed = run("/nowhere/at/all", PROMPT)
    assert (failed.returncode, failed.stdout) == (1, "")
    starting, error = failed.stderr.splitlines()
    assert starting == "starting pagewire serve /nowhere/at/all"
    assert error.startswith("pagewire: error: pagewire serve /nowhere/at/all ended with exit code 78: the")
