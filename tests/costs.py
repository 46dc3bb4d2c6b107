"""What the files of tests cost: a table at the end of a run, of those that cost most.

`make test COSTS=tests/costs.tsv`, and `make test-all` likewise, write what each file costs to the table that is
committed, which tests/project/test_costs.py holds against its budgets.
"""

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_FILES = 15
TEST, TEST_ALL = "test", "test-all"  # what runs a test, by its markers
_HEAD = "run\tCPU seconds\tfile\n"


def used_cpu() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of the fork servers and theirs."""
    forked = sys.modules.get("testing.forked")
    servers = forked.SERVERS.values() if forked is not None else ()
    return sum(os.times()[:4]) + sum(_cpu_of(server._forkserver_pid) for server in servers if server._forkserver_pid)


def _cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process that runs, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Costs:
    """Measures in the process of the tests, adds up in the one that reports: under xdist these are two.

    Attributes:
        of_file: seconds of processors, and of the clock, by path.
        of_run: seconds of processors by what runs the tests, and path.
    """

    def __init__(self, table: Path | None = None) -> None:
        """`table`: the file to which they are written."""
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
        """Follows each phase of a test: a fixture's end counts for the file of the last test that takes it."""
        report = yield
        before, self._before = self._before, used_cpu()
        report.cpu = self._before - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, _ = report.nodeid.partition("::")
        cpu, wall = self.of_file.get(path, (0.0, 0.0))
        taken = getattr(report, "cpu", 0.0)  # of a process that died there is a report, but no measurement
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
    """The seconds of processors by what runs the tests, and their file; none where there is no table."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return {(run, file): float(seconds) for run, seconds, file in (line.split("\t") for line in lines)}


def write_table(path: Path, costs: dict[tuple[str, str], float]) -> None:
    lines = (f"{run}\t{seconds:.1f}\t{file}\n" for (run, file), seconds in sorted(costs.items()))
    path.write_text(_HEAD + "".join(lines))
