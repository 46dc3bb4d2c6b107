"""Tests that `make` creates the virtual environment completely or not at all, and reports its progress."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import environment
from tests.environments import NO_INDEX

pytestmark = pytest.mark.thorough

SCRIPT = Path(environment.__file__)


def make(folder: Path) -> subprocess.Popen[str]:
    command, pipes = [sys.executable, SCRIPT, folder], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | NO_INDEX, **pipes)


def test_what_an_interrupt_left_is_made_again_and_no_index_is_told_as_such(tmp_path: Path) -> None:
    """An interrupt while pip is installed leaves a Python without pip. A pip for another Python does not count."""
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    of_another = folder / "lib/python3.9/site-packages/pip-1.dist-info"
    of_another.mkdir(parents=True)
    (of_another / "RECORD").touch()
    assert not environment.has_pip(folder)
    output, errors = make(folder).communicate()
    assert environment.has_pip(folder)
    assert f"making {folder} with Python" in output
    assert errors.startswith("pagewire: error: no package index was reached that has setuptools>=77; ")
    assert len(errors.splitlines()) == 1
    assert not (folder / ".ready").exists()


def test_an_environment_that_others_made_is_completed_and_nothing_of_it_removed(tmp_path: Path) -> None:
    """The environment has no pip, and its link to Python is dangling."""
    folder = tmp_path / ".venv"
    theirs = folder / "lib/python3.11/site-packages/theirs.py"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to("/no/such/python")
    assert "no package index was reached" in make(folder).communicate()[1]
    assert environment.has_pip(folder)
    assert theirs.exists()


def test_a_second_run_waits_for_the_first_and_takes_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / ".venv"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = make(folder)
        assert second.stdout is not None
        assert second.stdout.readline() == f"waiting for another make, which installs into {folder}\n"
        folder.mkdir()
        (folder / ".ready").touch()
    assert second.communicate() == ("", "")
    assert second.returncode == 0


def test_a_line_comes_while_a_process_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "SECONDS_BETWEEN_LINES", 0.01)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as waiting:

        def tell() -> str:
            assert waiting.stdin is not None
            waiting.stdin.close()  # ends the process
            return "putting pip into it"

        environment.watch(waiting, tell)
    assert capsys.readouterr().out.startswith("  putting pip into it\n")


def test_packages_that_an_interrupt_halved_are_not_taken_for_whole(tmp_path: Path) -> None:
    """Before the script's first install, no package counts as partly installed. Links never do."""
    packages = tmp_path / "lib/python3.11/site-packages"
    for name, files in {"half-1.dist-info": ["METADATA"], "whole-1.dist-info": ["METADATA", "RECORD"]}.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    (tmp_path / "elsewhere").mkdir()
    (packages / "linked-1.dist-info").symlink_to(tmp_path / "elsewhere")
    environment.remove_partial_installs(tmp_path)
    assert (packages / "half-1.dist-info").exists()
    environment.log_of(tmp_path).touch()
    environment.remove_partial_installs(tmp_path)
    assert sorted(folder.name for folder in packages.iterdir()) == ["linked-1.dist-info", "whole-1.dist-info"]


def test_an_environment_is_known_as_ours_before_anything_is_put_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt may leave even the first package partly installed."""
    folder = tmp_path / ".venv"

    def interrupt(command: list[object], **_: object) -> None:
        if "venv" in command:
            raise KeyboardInterrupt
        raise FileNotFoundError

    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder)])
    monkeypatch.setattr(environment.subprocess, "run", interrupt)
    monkeypatch.setattr(environment.subprocess, "Popen", interrupt)
    with pytest.raises(KeyboardInterrupt):
        environment.main()
    assert environment.log_of(folder).exists()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "exit code 3"),
        ("Traceback:\n/usr/bin/python3: No module named pip\n\n", "/usr/bin/python3: No module named pip"),
        ("ERROR: No space left on device\n[notice] A new release\n", "No space left on device"),
        ("ensurepip is not available\n", "on Debian and Ubuntu apt install python3."),
        (
            "ERROR: ... requirement a>=1 (from versions: none)\nERROR: b\n",
            "no package index was reached that has a>=1;",
        ),
    ],
)
def test_a_failure_is_one_line(said: str, line: str) -> None:
    assert environment.why_not(3, said).startswith(line)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "found 0 packages of about 9: looking for versions"),
        ("Collecting a>=1\n  Downloading a-1.whl (9 MB)\n", "found 1 packages of about 9: Downloading a-1.whl (9 MB)"),
        ("Collecting a\nProcessing /wheels/b-1.whl (from c)\n", "found 2 packages of about 9: b-1.whl"),
        ("Collecting a\nWARNING: Retrying (Retry(total=4))\n", "no answer from the package index, trying again"),
        ("Collecting a\nInstalling collected packages: a, b\n", "installed 1 packages of about 9"),
    ],
)  # fmt: skip
def test_a_line_says_how_far_pip_is(said: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/a-1.dist-info").mkdir(parents=True)
    assert environment.how_far(tmp_path, said, 9) == line
