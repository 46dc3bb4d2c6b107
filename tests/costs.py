"""The costs of test files in CPU seconds: a table of the most expensive files at the end of a run.

`make test COSTS=tests/costs.tsv` and `make test-all COSTS=tests/costs.tsv` write the costs of all files to the
committed table. tests/project/test_costs.py compares that table with the budgets.
"""

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_FILES = 15
TEST, TEST_ALL = "test", "test-all"  # the make targets; a test's markers decide which target runs it
_HEAD = "run\tCPU seconds\tfile\n"


def used_cpu() -> float:
    """Return the CPU seconds of this process, its ended children, and the fork servers with their ended children."""
    forked = sys.modules.get("testing.forked")
    servers = forked.SERVERS.values() if forked is not None else ()
    return sum(os.times()[:4]) + sum(_cpu_of(server._forkserver_pid) for server in servers if server._forkserver_pid)


def _cpu_of(pid: int) -> float:
    """Return the CPU seconds of a running process and its ended children; 0.0 if the process does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Costs:
    """A pytest plugin that measures the CPU and wall-clock time of each test file.

    The process that runs a test measures its costs; the reporting process adds them up. Under xdist these are different
    processes.

    Attributes:
        of_file: CPU seconds and wall-clock seconds, by path.
        of_run: CPU seconds, by make target and path.
    """

    def __init__(self, table: Path | None = None) -> None:
        """`table`: the file to write the costs to, or None."""
        self._before = used_cpu()
        self._table = table
        self.of_file: dict[str, tuple[float, float]] = {}
        self.of_run: dict[tuple[str, str], float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._before = used_cpu()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Measure each phase of a test.

        A fixture's teardown counts for the file of the last test that uses the fixture.
        """
        report = yield
        before, self._before = self._before, used_cpu()
        report.cpu = self._before - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, _ = report.nodeid.partition("::")
        cpu, wall = self.of_file.get(path, (0.0, 0.0))
        taken = getattr(report, "cpu", 0.0)  # the report of a process that died has no measurement
        self.of_file[path] = cpu + taken, wall + report.duration
        run = TEST_ALL if {"thorough", "alone"} & set(report.keywords) else TEST
        self.of_run[run, path] = self.of_run.get((run, path), 0.0) + taken

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.of_file) < 2:
            return
        everything = [sum(column) for column in zip(*self.of_file.values(), strict=True)]
        terminalreporter.section("what cost most: seconds of processors, of the clock")
        rows = sorted(self.of_file.items(), key=lambda row: max(row[1]), reverse=True)[:NUM_FILES]
        for path, (cpu, wall) in [*rows, (f"all {len(self.of_file)} files", everything)]:
            terminalreporter.write_line(f"{cpu:7.1f} {wall:7.1f}  {path}")
        if self._table is not None:
            write_table(self._table, read_table(self._table) | self.of_run)


def read_table(path: Path) -> dict[tuple[str, str], float]:
    """Return the CPU seconds by make target and test file; empty if the table does not exist."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {(run, file): float(seconds) for run, seconds, file in (line.split("\t") for line in lines)}


def write_table(path: Path, costs: dict[tuple[str, str], float]) -> None:
    lines = (f"{run}\t{seconds:.1f}\t{file}\n" for (run, file), seconds in sorted(costs.items()))
    path.write_text(_HEAD + "".join(lines))
