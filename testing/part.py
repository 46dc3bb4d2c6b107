"""A runner of long checks and measurements in parts. Each part is a process with a deadline.

A part is a sequence of cases, and each result is stored at once. The process of a part writes a line `RESULT {json}` to
standard output when it begins a case and when it has finished a case. Parts run in separate processes because a kernel
with an invalid memory access leaves its process without a device. Only the failing case is lost, and the next case
runs in a new process.
"""

import contextlib
import datetime
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from testing import ledger
from testing.record import machine, write

MARK = "RESULT "
MAX_ERROR_LENGTH = 2000


class UnavailableError(Exception):
    """Raised if a case cannot run on this machine, which is not a failure. The text is the reason."""


@dataclass(frozen=True)
class Case:
    """A check or a measurement.

    Attributes:
        name: unique within its part.
        run: returns figures as JSON values. Raises if the case fails, and `UnavailableError` if it cannot run.
    """

    name: str
    run: Callable[[], dict[str, Any]]


# Functions for the process of a part.


def run_cases(cases: Iterable[Case], done: Collection[str], after_each: Callable[[], None] = lambda: None) -> None:
    """Run the cases whose names are not in `done`, and print the result of each."""
    if os.getsid(0) == os.getpid():  # true if `run_part` started this process
        threading.Thread(target=_end_with_parent, daemon=True).start()
    for case in cases:
        if case.name in done:
            continue
        _tell({"name": case.name, "started": True})
        started = time.monotonic()
        result: dict[str, Any]
        try:
            result = case.run()
        except UnavailableError as error:
            result = {"unavailable": str(error)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]}
            traceback.print_exc()
        _tell({"name": case.name, **result, "wall_seconds": round(time.monotonic() - started, 3)})
        after_each()


def run_on_device(cases: Iterable[Case], device: torch.device, done: Collection[str]) -> None:
    """Run the cases whose names are not in `done`, and free the device's memory after each case."""

    def release() -> None:
        gc.collect()
        if device.type == "cuda":
            # raises if this case has lost the device, so that the next case gets a new process
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    run_cases(cases, done, release)


def _end_with_parent() -> None:
    """Kill this session when its parent process ends, because it would keep the device busy."""
    os.read(0, 1)
    _kill(os.getpid())


def _tell(result: dict) -> None:
    print(MARK + json.dumps(result), flush=True)


# Functions for the process that starts the processes of the parts.


def describe(device: torch.device) -> dict[str, Any]:
    """Return the card, the driver, versions, the machine and the date."""
    is_cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if is_cuda else str(device),
        "driver": _driver() if is_cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


# A part may be resumed if these fields of its heading are unchanged, including `is_complete`.
_SAME_SOURCE = ("card", "driver", "torch", "triton", "digest", "is_complete")


def _heading(part: str, heading: dict[str, Any]) -> dict[str, Any]:
    source = {"commit": ledger.commit(), "digest": ledger.digest_of(part)}
    return {**heading, **source, "is_complete": False, "results": []}


class Report:
    """A file of the results so far: for each part the machine, the source, and the results.

    Parts that are not run now keep their results.
    """

    def __init__(self, path: Path, heading: dict[str, Any], parts: Sequence[str], *, resumes: bool = False) -> None:
        """Read the file, if it exists. `heading` is the result of `describe`.

        With `resumes`, a part that an earlier run began on the same machine and source, and did not complete, keeps its
        results. Only the rest of that part is run.
        """
        self._path = path
        self._lock = threading.Lock()
        known = ledger.parts_of(path)
        begun = {name: _heading(name, heading) for name in parts}
        resumed = {
            name: known[name]
            for name, part in begun.items()
            if resumes and all(known.get(name, {}).get(key) == part.get(key) for key in _SAME_SOURCE)
        }
        self.parts: dict[str, dict[str, Any]] = {**known, **begun, **resumed}
        self._current = list(parts)
        self._paused: set[str] = set()
        self._further: dict[str, Any] = {}
        self._write()

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results of the parts that are run now."""
        return [result for name in self._current for result in self.parts[name]["results"]]

    @property
    def num_failed(self) -> int:
        """The number of failures among these results. If there is no result, that counts as one failure."""
        return sum("error" in result for result in self.results) if self.results else 1

    def add(self, part: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.parts[part]["results"].append(result)
            self._write()
            print(line(result), flush=True)

    def names(self, part: str) -> list[str]:
        """Return the names of the cases that have a result."""
        return [result["name"] for result in self.parts[part]["results"]]

    def pause(self, part: str) -> None:
        """Leave the rest of a part to a later run, which resumes it."""
        self._paused.add(part)

    def end(self, parts: Iterable[str]) -> None:
        """Mark parts as complete, unless one of their processes was paused."""
        for part in set(parts) - self._paused:
            self.parts[part]["is_complete"] = True
        self._write()

    def put(self, **further: Any) -> None:
        """Add judgements that follow from the results."""
        self._further = further
        self._write()

    def _write(self) -> None:
        write(self._path, {"parts": self.parts, **self._further})


def line(result: dict[str, Any]) -> str:
    """Return a result as a line of text."""
    if "error" in result:
        return f"FAILED  {result['name']}: {result['error'].splitlines()[0]}"
    if "unavailable" in result:
        return f"-       {result['name']}: {result['unavailable']}"
    if "bytes_moved" in result:
        return _timing_line(result)
    figures = {key: value for key, value in result.items() if key not in ("name", "wall_seconds")}
    shown = [f"{key} {value:.4g}" for key, value in figures.items() if isinstance(value, int | float)]
    return f"ok      {result['name']} ({', '.join([*shown, format(result['wall_seconds'], '.1f') + ' s'])})"


def _timing_line(result: dict[str, Any]) -> str:
    rate = f", {result['bytes_moved'] / result['seconds'] / 1e9:,.0f} GB/s" if result["bytes_moved"] else ""
    rate += f", {result['flops'] / result['seconds'] / 1e12:,.0f} TFLOP/s" if result["flops"] else ""
    host = ", the host's part included" if result["includes_host"] else ""
    return f"{result['seconds'] * 1e6:10.1f} us  {result['name']}{rate}{host}"


def run_part(part: str, command: Sequence[str], report: Report, deadline: float, pause_at: float = math.inf) -> None:
    """Run the cases of a part in a process, and the remaining cases in a new process if that process dies.

    Args:
        command: receives the names of the cases that have results as further arguments.
        deadline: on the monotonic clock; a case that is still running then has failed, and later cases are not run.
        pause_at: on the same clock; the remaining cases are then left to a later run.

    All descendants of the process are killed when it ends.
    """
    while True:
        known = report.names(part)
        # Its own session identifies all of its descendants.
        process = subprocess.Popen(
            [*command, *known], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        timer = threading.Timer(max(0.1, min(deadline, pause_at) - time.monotonic()), _kill, [process.pid])
        timer.start()
        try:
            started = _read_results(process, part, report)
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process.pid)
            assert process.stdin is not None
            process.stdin.close()
        if status == 0:
            return
        if time.monotonic() >= pause_at:
            report.pause(part)
            return
        if time.monotonic() >= deadline:
            report.add(part, {"name": started or part, "error": "out of time, with all later checks"})
            return
        if started is None and report.names(part) == known:
            report.add(part, {"name": part, "error": f"its process ended with status {status}"})
            return
        if started is not None:
            report.add(part, {"name": started, "error": f"its process died with status {status}"})


def _kill(session: int) -> None:
    """Kill all processes of a session, in any process group. The session's leader is killed last."""
    while pids := sorted(_processes_of(session), key=lambda pid: pid == session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes_of(session: int) -> list[int]:
    """Return the processes of a session, without zombies, on Linux."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _read_results(process: "subprocess.Popen[str]", part: str, report: Report) -> str | None:
    """Add the results from the process to the report.

    Return the name of a case that has begun and has no result, or None.
    """
    started = None
    assert process.stdout is not None
    for text in process.stdout:
        if not text.startswith(MARK):
            print(text, end="", file=sys.stderr)
            continue
        result = json.loads(text[len(MARK) :])
        if result.get("started"):
            started = result["name"]
        else:
            report.add(part, result)
            started = None
    return started
