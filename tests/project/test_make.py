"""Tests of the Makefile: errors about Python are one line, and `make test` announces its parts.

Without a suitable Python, `make` prints one line instead of a resolver's error. A part of `make test` does not report
the tests of another part.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The check runs in an interpreter that pretends to have another version. The script that creates the environment only
# reports that it ran.
FAKE_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
  exec {python} -c 'import sys; sys.version_info = ({version}, 0, "final", 0); sys.argv = sys.argv[1:]
exec(sys.argv[0])' "$2" "$3"
fi
echo "ran $*"
exit 3
"""


def make(folder: Path, version: str, place: str) -> tuple[list[str], str]:
    """Run `make setup`. Return the lines on standard error that are not make's own, and standard output."""
    python = folder / place
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(FAKE_PYTHON.format(python=sys.executable, version=version.replace(".", ",")))
    python.chmod(0o755)
    return run_make(folder, f"PYTHON={folder / 'python'}")


def run_make(folder: Path, *arguments: str) -> tuple[list[str], str]:
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    command = ["make", "-f", str(ROOT / "Makefile"), "setup", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("make", "find"))]
    return lines, done.stdout


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.10"])
def test_another_python_gets_one_line(version: str, tmp_path: Path) -> None:
    lines, output = make(tmp_path, version, "python")
    (line,) = lines
    start = "Pagewire needs Python 3.11 or newer, and "
    assert re.fullmatch(rf"{start}.* is {re.escape(version)}: name another, make PYTHON=/path/to/python3\.14", line)
    assert "ran" not in output


@pytest.mark.parametrize("version", ["3.11", "3.14", "3.15", "4.0"])
def test_a_python_that_it_runs_on_makes_the_environment(version: str, tmp_path: Path) -> None:
    """A newer version of Python than the tested ones causes a line on standard error."""
    lines, output = make(tmp_path, version, "python")
    assert len(lines) == (version > "3.14")
    assert all(line.startswith("Pagewire is tried on Python 3.11 to 3.14, and ") for line in lines)
    assert "ran deploy/environment.py .venv" in output


def test_an_environment_of_another_python_is_to_be_removed(tmp_path: Path) -> None:
    (line,), output = make(tmp_path, "3.10", ".venv/bin/python")
    assert line.endswith(" is 3.10: remove .venv to have it made again")
    assert "ran" not in output
    assert "ran deploy/environment.py .venv" in make(tmp_path, "3.11", ".venv/bin/python")[1]


def test_no_python_at_all_gets_one_line(tmp_path: Path) -> None:
    (line,), _ = run_make(tmp_path, "PYTHON=no-such-python")
    assert line == "there is no no-such-python: install Python 3.14, or name one, make PYTHON=/path/to/python3.14"


@pytest.mark.parametrize("version", [None, "18.20.1"])
def test_clients_without_node_get_one_line(version: str | None, tmp_path: Path) -> None:
    """The tests are not skipped."""
    make = shutil.which("make")
    assert make
    for name, status in (("npm", 0), ("node", 1)) if version else ():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    command = [make, "-f", str(ROOT / "Makefile"), "test-clients"]
    environ = {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert lines == ["make test-clients needs Node with npm: install Node 20 or newer"]
    assert done.returncode == 2


def test_clients_are_tried_by_their_own_target_alone() -> None:
    others = [f"--ignore={path}" for path in (ROOT / "tests").iterdir() if path.name != "clients"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *others]
    for chosen, found in (([], False), (["tests/clients"], True)):
        done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
        assert ("test_agents.py::test_codex" in done.stdout, done.returncode) == (found, 0 if found else 5), done.stdout
    nightly = re.search(r"^NIGHTLY := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert nightly
    assert "test-clients" in nightly[1].split()


def test_everything_says_the_same_of_versions() -> None:
    language = "Programming Language :: Python :: "
    tried = [line.removeprefix(language) for line in PROJECT["classifiers"] if line.startswith(language)]
    assert PROJECT["requires-python"] == f">={tried[0]}"
    assert f"tried on Python {tried[0]} to {tried[-1]}" in (ROOT / "Makefile").read_text()


def parts_of(*arguments: str) -> list[str]:
    """Return the title and the command of each part that `make` would run with these arguments."""
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return re.findall(r"\brun ('part .*?);", done.stdout, re.DOTALL)


def test_parts_of_a_whole_run_say_how_long_they_take() -> None:
    for target in ("test", "test-all"):
        for part in parts_of(target):
            assert re.match(r"'part \d of 2, (some minutes|a minute|a quarter of an hour): ", part), part
    assert all(re.match(r"'part \d of 2: ", part) for part in parts_of("test", "ARGS=tests/core"))


def test_each_folder_of_tests_is_run() -> None:
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    folders = {f"tests/{path.parts[1]}" for path in paths} - {"tests/clients"}  # has a separate target
    chosen = [re.findall(r"tests/\w+", part) for part in parts_of("test")]
    assert sorted(itertools.chain.from_iterable(chosen)) == sorted(folders)
    whole, alone = parts_of("test-all")
    assert "tests/" not in whole, "all folders"
    marked = {
        f"tests/{path.parts[1]}" for path in paths if "\npytestmark = pytest.mark.alone" in (ROOT / path).read_text()
    }
    assert marked == set(re.findall(r"tests/\w+", alone))


@pytest.mark.parametrize(("chosen", "summary"), [([], "2 passed"), (["-k", "one"], "1 passed, 2 deselected")])
def test_what_another_part_runs_is_not_told(chosen: list[str], summary: str, tmp_path: Path) -> None:
    """The summary counts tests that `-k` deselects, but not the tests of another part."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_finish\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    tests = "def test_one(): pass\ndef test_two(): pass\n@pytest.mark.alone\ndef test_other(): pass\n"
    (tmp_path / "test_few.py").write_text(f"import pytest\n{tests}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not alone", *chosen]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith(f"{summary} in ")
