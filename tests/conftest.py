"""Pytest hooks and process settings for all tests."""

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagewire.hosting import supervisor
from tests.costs import Costs
from tests.covering import covering

# Tests run tiny models in several processes at a time. A second OpenMP thread per process would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# If a test asks for more threads, idle threads sleep and leave the cores to other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Otherwise every server of the tests would use port 8000, and one more process.
os.environ.setdefault("PAGEWIRE_HTTP_PORT", "0")

# Otherwise each of the hundreds of processes that tests start would compile the same sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Shells start background commands with SIGINT ignored, and child processes inherit that: tests of Ctrl-C would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# When tests kill a server, gRPC's core logs GOAWAY lines, which mean nothing here.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Compiled code is stored in the user's cache, but not every user has a writable home directory.
HOME = Path(os.path.expanduser("~"))
if not (HOME.is_dir() and os.access(HOME, os.W_OK)):
    os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".pytest_cache" / "home"))
    os.environ.setdefault("TRITON_HOME", os.environ["XDG_CACHE_HOME"])

# Triton chooses its interpreter when it is imported. transformers imports Triton before tests/kernels/triton can
# choose.
DEVICES = ("nvidia*", "nvhost*", "dxg")
if not any(device for pattern in DEVICES for device in Path("/dev").glob(pattern)):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what the files of tests cost to this table")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.getoption("--costs")))
    if hasattr(config, "workerinput"):
        # Parallel test processes use separate port ranges, so that no two processes choose the same port.
        number, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
        size = len(supervisor.WORKER_PORTS) // count
        supervisor.WORKER_PORTS = supervisor.WORKER_PORTS[number * size : (number + 1) * size]
        # Runs after all other exit handlers. Freeing a million objects one by one would take seconds of CPU time.
        atexit.register(os._exit, 0)
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS or "tests/worker" in config.args
    if is_whole and config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # Build the library in the background. Otherwise all processes would wait for the first process that needs it.
        command = [sys.executable, "-m", "testing.kernels.compiler"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # tests that need it report the reason
        building = subprocess.Popen(command, cwd=config.rootpath, start_new_session=True, **quiet)
        config.add_cleanup(lambda: interrupt(building))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide the count of deselected tests: another part of `make test` runs them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not session.config.getoption("keyword"):
        reporter.stats.pop("deselected", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed torch's global generator, so that its random numbers do not depend on the preceding tests."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and its process group, so that a running compiler leaves no partial output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    process.wait()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during test collection: imported modules and collected tests live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(5_000, 20, 100)  # each full collection would traverse all imports
        atexit.register(gc.unfreeze)  # otherwise libraries would report these objects as leaked


@pytest.hookimpl(tryfirst=True)  # must run before pytest's own hook, in which markers select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by folder, and mark the cases that only `make test-all` runs.

    Folders with long tests come first, so that no process ends with a long file. The tests of the CPU kernels follow
    later, when the kernels have been built.
    """
    folders = ("system", "worker", "kernels", "sim", "project")
    order = {Path(__file__).parent / folder: index for index, folder in enumerate(folders)}

    @cache
    def place(path: Path) -> int:
        return min(order.get(parent, len(folders)) for parent in path.parents)

    items.sort(key=lambda item: place(item.path))
    mark_what_covering_cases_leave(items)


def mark_what_covering_cases_leave(items: list[pytest.Item]) -> None:
    """Mark as `thorough` the cases that the marker `one_of_each` does not choose for `make test`."""
    tests: dict[tuple[Path, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("one_of_each"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        rows = [parameters_of(case) for case in cases]
        for index in {*range(len(cases))} - {*covering(rows)}:
            cases[index].add_marker("thorough")


def parameters_of(case: Any) -> list[str]:
    """Return the values of the parameters that the marker names, or of all parameters, as strings.

    Without names in the marker, the parameters of one `parametrize` count as one value.
    """
    params = dict(case.callspec.params)
    if names := case.get_closest_marker("one_of_each").args:
        return [repr(params[name]) for name in names]
    marked = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in marked]
    together = [repr([params.pop(name) for name in names]) for names in groups]
    return [*together, *map(repr, params.values())]
