"""Tests of the report and the bounds of the tests' own costs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.costs import TEST, TEST_ALL, read_table, write_table

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "costs.tsv"
# CPU seconds. If a file takes longer, mark some of its tests as `thorough` or make it faster.
MAX_FILE_S = {TEST: 40.0, TEST_ALL: 180.0}
MAX_ALL_S = {TEST: 850.0, TEST_ALL: 2000.0}  # 8 and 30 minutes of two cores, without start-up and waiting
FILES = {
    "conftest.py": """
        from tests.costs import Costs
        def pytest_configure(config):
            config.pluginmanager.register(Costs())
    """,
    "test_computes.py": """
        import subprocess, sys
        def test_child():
            subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
    """,
    "test_waits.py": "import time\ndef test_wait(): time.sleep(0.3)",
    "test_dies.py": "import os\ndef test_end(): os._exit(1)",
}


@pytest.mark.parametrize("num_processes", [0, 2])
def test_files_are_listed_with_their_seconds(tmp_path: Path, num_processes: int) -> None:
    for name, text in FILES.items():
        if num_processes or name != "test_dies.py":  # the run would end with its only process
            (tmp_path / name).write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(num_processes), "-p", "no:cacheprovider", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    _, title, table = done.stdout.partition("what cost most")
    assert title, done.stdout + done.stderr
    rows = {row[2]: (float(row[0]), float(row[1])) for row in map(str.split, table.splitlines()[1:4])}
    assert rows["test_computes.py"][0] >= 0.5  # the child process's time
    assert rows["test_waits.py"][1] >= 0.3


def test_no_file_costs_more_than_its_budget() -> None:
    for run, most in MAX_FILE_S.items():
        costs = {file: seconds for (of, file), seconds in read_table(TABLE).items() if of == run}
        assert {file: seconds for file, seconds in costs.items() if seconds > most} == {}
        assert sum(costs.values()) <= MAX_ALL_S[run]


def test_the_table_names_files_that_there_are() -> None:
    assert [file for _, file in read_table(TABLE) if not (ROOT / file).exists()] == []


def test_a_table_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "costs.tsv"
    costs = {(TEST, "tests/a.py"): 1.25, (TEST_ALL, "tests/a.py"): 10.0, (TEST, "tests/b.py"): 0.0}
    write_table(path, costs)
    assert read_table(path) == costs | {(TEST, "tests/a.py"): 1.2}
    write_table(path, read_table(path) | {(TEST, "tests/b.py"): 2.0})
    assert read_table(path)[TEST, "tests/b.py"] == 2.0
