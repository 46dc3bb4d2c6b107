"""What the files of tests cost: a table at the end of a run, of those that cost most."""

import os
from collections.abc import Generator

import pytest

NUM_FILES = 15


def used_cpu() -> float:
    """Seconds of this process, and of its children that have been waited for."""
    return sum(os.times()[:4])


class Costs:
    """Measures in the process of the tests, adds up in the one that reports: under xdist these are two.

    Attributes:
        of_file: seconds of processors, and of the clock, by path.
    """

    def __init__(self) -> None:
        self._before = used_cpu()
        self.of_file: dict[str, tuple[float, float]] = {}

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
        # Of a process that died there is a report, but no measurement.
        self.of_file[path] = cpu + getattr(report, "cpu", 0.0), wall + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.of_file) < 2:
            return
        everything = [sum(column) for column in zip(*self.of_file.values(), strict=True)]
        terminalreporter.section("what cost most: seconds of processors, of the clock")
        rows = sorted(self.of_file.items(), key=lambda row: max(row[1]), reverse=True)[:NUM_FILES]
        for path, (cpu, wall) in [*rows, (f"all {len(self.of_file)} files", everything)]:
            terminalreporter.write_line(f"{cpu:7.1f} {wall:7.1f}  {path}")
