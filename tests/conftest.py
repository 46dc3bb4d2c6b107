"""What holds for all tests."""

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

# Tests run tiny models, several processes at a time: a second OpenMP thread each would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for more, its threads sleep while they wait, and leave the cores to the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Or every server of the tests would take port 8000, and a process more.
os.environ.setdefault("PAGEWIRE_HTTP_PORT", "0")

# Or each of the hundreds of processes that tests start would compile the same sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Shells start what runs in the background with SIGINT ignored, as would every child: tests of Ctrl-C would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers that are killed make gRPC's core write lines (goaway) that mean nothing here.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# What is compiled is kept in the user's cache, and not every user has a home that can be written to.
HOME = Path(os.path.expanduser("~"))
if not (HOME.is_dir() and os.access(HOME, os.W_OK)):
    os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".pytest_cache" / "home"))
    os.environ.setdefault("TRITON_HOME", os.environ["XDG_CACHE_HOME"])

# Triton chooses its interpreter while it is imported; transformers imports it before tests/kernels/triton can choose.
DEVICES = ("nvidia*", "nvhost*", "dxg")
if not any(device for pattern in DEVICES for device in Path("/dev").glob(pattern)):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what the files of tests cost to this table")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.getoption("--costs")))
    if hasattr(config, "workerinput"):
        # Processes beside each other find ports of their own: none that another is about to take.
        number, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
        size = len(supervisor.WORKER_PORTS) // count
        supervisor.WORKER_PORTS = supervisor.WORKER_PORTS[number * size : (number + 1) * size]
        # After all else that is done at the end: to free a million objects one by one takes seconds of a processor.
        atexit.register(os._exit, 0)
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS or "tests/worker" in config.args
    if is_whole and config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        # All processes would wait for the first that needs the library.
        command = [sys.executable, "-m", "testing.kernels.compiler"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # tests that need it say what is wrong
        building = subprocess.Popen(command, cwd=config.rootpath, start_new_session=True, **quiet)
        config.add_cleanup(lambda: interrupt(building))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Says nothing of the tests that another part of `make test` runs."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not session.config.getoption("keyword"):
        reporter.stats.pop("deselected", None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What torch draws without a generator is the same whichever tests came before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Its compiler too: so it leaves nothing half done."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    process.wait()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays until the end: no collection of garbage walks it before."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(5_000, 20, 100)  # each of hundreds of full collections would look at what tests import
        atexit.register(gc.unfreeze)  # or libraries would call it leaked


@pytest.hookimpl(tryfirst=True)  # markers choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, lest one process is left with such a file in the end; the CPU's kernels come when
    they have been built."""
    folders = ("system", "worker", "kernels", "sim", "project")
    order = {Path(__file__).parent / folder: index for index, folder in enumerate(folders)}

    @cache
    def place(path: Path) -> int:
        return min(order.get(parent, len(folders)) for parent in path.parents)

    items.sort(key=lambda item: place(item.path))
    mark_what_covering_cases_leave(items)


def mark_what_covering_cases_leave(items: list[pytest.Item]) -> None:
    """Leave to `make test-all` the cases that the marker `one_of_each` does not choose for `make test`."""
    tests: dict[tuple[Path, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("one_of_each"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        rows = [parameters_of(case) for case in cases]
        for index in {*range(len(cases))} - {*covering(rows)}:
            cases[index].add_marker("thorough")


def parameters_of(case: Any) -> list[str]:
    """Return the values of the parameters that the marker names, or of all; those of one `parametrize` are one."""
    params = dict(case.callspec.params)
    if names := case.get_closest_marker("one_of_each").args:
        return [repr(params[name]) for name in names]
    marked = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in marked]
    together = [repr([params.pop(name) for name in names]) for names in groups]
    return [*together, *map(repr, params.values())]
