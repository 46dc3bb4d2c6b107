"""The choice of the compiler that builds the CPU kernels, and failing or interrupted compilers.

All compilers in these tests are small shell scripts, alone on the path.
"""

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import IO

import pytest

from pagewire.kernels.cpu import BuildError, compiler, library
from pagewire.kernels.cpu.library import Build, build_library

# A build only needs the file named after -o.
WORKING = 'echo "$0 1.0"; while [ $# != 0 ]; do [ "$1" != -o ] || : >"$2"; shift; done'
FAILING = 'case "$*" in *--version) echo "1.0";; *) echo "$0: error: no headers"; exit 1;; esac'
NO_OPENMP = """case "$*" in
*--version) echo "clang version 14";; *) echo "fatal error: 'omp.h' file not found"; exit 1;; esac"""
FLAGS = ["-O3"]
DEADLINE = 60.0  # seconds: the longest wait of any test


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Machine":
    return Machine(tmp_path, monkeypatch)


class Machine:
    """A machine with an empty path, an empty cache, and kernels of two compilation units."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs, self.cache, source = folder / "bin", folder / "cache", folder / "source"
        self.programs.mkdir()
        source.mkdir()
        for name in ("one", "two"):
            (source / f"{name}.c").write_text(f"int {name};\n")
        monkeypatch.setattr(library, "SOURCES", source)
        monkeypatch.setattr(compiler, "_TIMEOUT_S", DEADLINE)
        monkeypatch.setenv("PATH", str(self.programs))

    def install(self, name: str, script: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.programs / name).chmod(0o755)

    def build(self, named: str | None = None, tell: Callable[[str], object] = lambda doing: None) -> Path:
        return build_library(Build(compiler=named, cache=self.cache, tell=tell), FLAGS)

    def refusal(self, named: str | None = None) -> str:
        with pytest.raises(BuildError) as caught:
            self.build(named)
        return str(caught.value)


def test_a_command_is_read_as_by_a_shell(machine: Machine) -> None:
    machine.install("ccache", f'[ "$1" = "{machine.programs}/my cc" ] || exit 9; shift; {WORKING}')
    path = machine.build(f"ccache '{machine.programs}/my cc' -m64")
    assert library.is_sealed(path)
    assert machine.build(f"ccache '{machine.programs}/my cc' -m64") == path


def test_next_compiler_is_tried_and_the_failure_logged(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.install("cc", FAILING)
    machine.install("clang", WORKING)
    path = machine.build("ccache gcc")
    assert library.is_sealed(path)
    line, *units = caplog.messages
    assert units == [f"compiling the CPU kernels: {number} of 2 units" for number in (1, 2)]
    assert line.startswith(f"compiling the CPU kernels with {machine.programs}/clang, ")
    assert line.endswith(
        f"(ccache gcc: there is no ccache; cc: failed with 1: {machine.programs}/cc: error: no headers; gcc: not found)"
    )
    assert machine.build("ccache gcc") == path
    assert len(caplog.messages) == 3


def test_all_are_named_where_none_works(machine: Machine) -> None:
    machine.install("clang", NO_OPENMP)
    machine.install("gcc", FAILING)
    (machine.programs / "cc").symlink_to("gcc")
    assert machine.refusal("'cc") == (
        "there is no C compiler that works ('cc: No closing quotation; "
        f"cc: failed with 1: {machine.programs}/cc: error: no headers; "
        "clang: it has no OpenMP: install libomp-dev); install one, for example gcc"
    )


def test_what_was_built_outlives_the_compiler(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler was uninstalled or no longer works. Another compiler that works builds again."""
    caplog.set_level(logging.INFO)
    machine.install("cc", WORKING)
    path = machine.build()
    shutil.rmtree(machine.programs)
    assert machine.build() == path
    assert caplog.messages[-1].startswith("using CPU kernels that another compiler has built: there is no C compiler")
    machine.programs.mkdir()
    machine.install("gcc", FAILING)
    assert machine.build() == path
    machine.install("gcc", WORKING)
    assert machine.build() != path
    path.write_bytes(b"damaged")
    shutil.rmtree(machine.programs)
    assert library.is_sealed(machine.build())


def test_folders_above_the_cache_are_made(machine: Machine) -> None:
    machine.install("cc", WORKING)
    machine.cache /= "of a new user"
    assert library.is_sealed(machine.build())


def test_the_one_that_is_named_builds_anew(machine: Machine) -> None:
    """A named compiler builds although another has built already. If it fails, the other's library is used."""
    machine.install("cc", WORKING)
    machine.install("mine", f"# mine\n{WORKING}")
    path = machine.build()
    assert machine.build("mine") not in (path, None)
    assert machine.build() == machine.build("not-there") == machine.build(" ") == path


def test_links_to_a_wrapper_are_several(machine: Machine) -> None:
    machine.install("ccache", f'case "$0" in */cc) echo no; exit 1;; *) {WORKING};; esac')
    for name in ("cc", "gcc"):
        (machine.programs / name).symlink_to("ccache")
    assert library.is_sealed(machine.build())


def test_the_lock_is_one_that_nfs_takes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file is opened for writing, or for reading if it belongs to another user."""
    taken: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda file, how: taken.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE))
    machine.install("cc", WORKING)
    machine.build()
    opened = os.open

    def refuse_writing(path: Path, flags: int, *rest: int) -> int:
        if Path(path).name == "lock" and flags & os.O_ACCMODE != os.O_RDONLY:
            raise PermissionError
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_writing)
    machine.install("cc", f"# another\n{WORKING}")
    build_library(Build(cache=machine.cache), ["-O2"])
    assert taken == [os.O_RDWR, os.O_RDONLY]


def test_the_number_of_jobs_makes_no_other_build() -> None:
    assert Build(num_jobs=1) == Build(num_jobs=2)


def test_units_are_compiled_side_by_side(machine: Machine, tmp_path: Path) -> None:
    """Each unit waits for the other: a FIFO opens once it has both a writer and a reader."""
    os.mkfifo(tmp_path / "meeting")
    meet = f'case "$*" in *one.c) echo >{tmp_path}/meeting;; *two.c) read -r _ <{tmp_path}/meeting;; esac'
    machine.install("cc", f"{meet}; {WORKING}")
    assert library.is_sealed(build_library(Build(cache=machine.cache, num_jobs=2), FLAGS))


def test_it_says_how_many_units_are_compiled(machine: Machine) -> None:
    machine.install("cc", WORKING)
    told: list[str] = []
    machine.build(tell=told.append)
    assert told == [f"compiling the CPU kernels: {number} of 2 units" for number in range(3)]
    machine.build(tell=told.append)
    assert len(told) == 3


def test_waiting_for_another_build_is_logged(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.install("cc", WORKING)
    machine.cache.mkdir()
    told: list[str] = []
    with open(machine.cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def tell(doing: str) -> None:
            told.append(doing)
            fcntl.flock(lock, fcntl.LOCK_UN)

        machine.build(tell=tell)
    assert told[:2] == [
        "waiting for another process that compiles the CPU kernels",
        "compiling the CPU kernels: 0 of 2 units",
    ]
    assert told[0] == caplog.messages[0]


def test_a_failing_unit_ends_the_others(machine: Machine, tmp_path: Path) -> None:
    """A failing unit ends the other compilers; otherwise the build would wait for them until their deadline."""
    os.mkfifo(tmp_path / "meeting")
    meet = (
        f'case "$*" in *one.c) echo >{tmp_path}/meeting; exec /bin/sleep 600;; *two.c) read -r _ <{tmp_path}/meeting;'
    )
    machine.install("cc", f"{meet} echo error: no; exit 3;; *) {WORKING};; esac")
    began = time.monotonic()
    with pytest.raises(BuildError, match=r"^cc failed with 3: error: no$"):
        build_library(Build(cache=machine.cache, num_jobs=2), FLAGS)
    assert time.monotonic() - began < DEADLINE / 2


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        ("kill -KILL $$", "cc ran out of memory"),
        ("echo cc1: out of memory allocating 65536 bytes; exit 1", "cc ran out of memory"),
        (
            "echo error: cannot write: No space left on device; exit 1",
            " is full: make room, or set PAGEWIRE_CACHE to a",
        ),
    ],
)
def test_build_failure_is_one_short_line(ending: str, line: str, machine: Machine) -> None:
    machine.install("cc", f'case "$*" in *one.c) {ending};; *) {WORKING};; esac')
    refusal = machine.refusal()
    assert line in refusal
    assert "\n" not in refusal
    assert len(refusal) < 80 + len(str(machine.cache))


def test_a_start_with_a_library_runs_one_compiler(machine: Machine) -> None:
    machine.install("cc", f'echo "$1" >>{machine.programs}/log; {WORKING}')
    machine.install("gcc", f"# another\necho gcc >>{machine.programs}/log")
    path = machine.build()
    (machine.programs / "log").write_text("")
    assert machine.build() == path
    assert (machine.programs / "log").read_text() == "--version\n"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("echo gcc: fatal error: Killed signal terminated program cc1; exit 1", "ran out of memory"),
        ("echo error: no; exit 3", "failed with 3: error: no"),
    ],
)
def test_a_build_that_fails_is_not_tried_again_within_the_hour(
    ending: str, reason: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(library, "time", SimpleNamespace(time=lambda: now))
    log = machine.programs / "log"
    machine.install("cc", f'case "$*" in *one.c) echo one >>{log}; {ending};; *) {WORKING};; esac')
    assert machine.refusal() == f"cc {reason}"
    (failure,) = machine.cache.glob("*/*.failed")
    now = failure.stat().st_mtime + 59 * 60
    assert machine.refusal() == (
        f"cc {reason}, 59 min ago; it is tried again an hour after that, or once {failure} is removed"
    )
    assert log.read_text() == "one\n"
    now += 60
    assert machine.refusal() == f"cc {reason}"
    failure.unlink()
    assert machine.refusal() == f"cc {reason}"
    assert log.read_text() == "one\n" * 3
    failure.write_text("")  # as left by a machine that lost power
    machine.install("cc", WORKING)
    path = machine.build()
    assert list(path.parent.iterdir()) == [path]


def test_a_kept_library_is_taken_at_once_where_the_build_failed(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine.install("cc", WORKING)
    path = machine.build()
    log = machine.programs / "log"
    machine.install("cc", f'echo "$1" >>{log}; case "$*" in *two.c) exit 1;; *) echo another; {WORKING};; esac')
    assert machine.build() == path
    log.write_text("")
    assert machine.build() == path
    assert log.read_text() == "--version\n"
    assert "another compiler has built: cc failed with 1, " in caplog.messages[-1]
    assert "it is tried again an hour after that" in caplog.messages[-1]


@pytest.mark.parametrize(
    "ending",
    [
        "kill -TERM $$",
        "echo gcc: fatal error: Terminated signal terminated program cc1; exit 1",
        "echo sh: 1: Cannot fork; exit 2",
        "echo gcc: fatal error: vfork: Resource temporarily unavailable; exit 1",
        "echo cc1: error: one.c: Input/output error; exit 1",
        "echo error: cannot write: No space left on device; exit 1",
    ],
)
def test_transient_build_failures_are_retried_at_next_start(ending: str, machine: Machine) -> None:
    script = f'case "$*" in *one.c) [ -e {machine.programs}/passed ] || {{ {ending}; }};; esac; {WORKING}'
    machine.install("cc", script)
    machine.refusal()
    (machine.programs / "passed").touch()
    assert library.is_sealed(machine.build())


def reading(fifo: Path) -> IO[bytes]:
    """Create a FIFO and open it without waiting for a writer."""
    os.mkfifo(fifo)
    return open(fifo, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def first_of(*files: IO[bytes] | None) -> IO[bytes] | None:
    """Return the first file that can be read or is at its end, or None after `DEADLINE` seconds."""
    return next(iter(select(files, [], [], DEADLINE)[0]), None)


BUILDING = """
import sys
import time
from pathlib import Path
from pagewire.kernels.cpu import library
library.SOURCES = Path(sys.argv[1])
library.build_library(library.Build(cache=Path(sys.argv[2])), ["-O3"])
"""


def test_out_of_memory_of_parallel_compilers_is_not_remembered(machine: Machine) -> None:
    machine.install("cc", f'case "$*" in *one.c) kill -KILL $$;; *) {WORKING};; esac')
    with pytest.raises(BuildError, match="ran out of memory"):
        library.build_library(library.Build(cache=machine.cache, num_jobs=2), ["-O3"])
    assert not list(machine.cache.glob("*/*.failed"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_compiler_ends(number: int, machine: Machine, tmp_path: Path) -> None:
    """The compiler ends with the process, however that ends. The next start removes the unfinished build."""
    # The grandchild, which stands for cc1, keeps the second FIFO open while it lives. It writes to the first FIFO at
    # its start.
    machine.install(
        "cc",
        f'case "$*" in *one.c) ( echo at work >{tmp_path}/compiling; exec /bin/sleep 600 ) 3>{tmp_path}/ended;; '
        f"*) {WORKING};; esac",
    )
    command = [sys.executable, "-W", "ignore", "-c", BUILDING, str(library.SOURCES), str(machine.cache)]
    with (
        reading(tmp_path / "compiling") as compiling,
        reading(tmp_path / "ended") as ended,
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
    ):
        try:
            assert first_of(compiling, process.stdout) is compiling  # the other file ends with the process
            assert compiling.read() == b"at work\n"
            process.send_signal(number)
            process.wait(DEADLINE)
            assert first_of(ended) is ended
            assert ended.read() == b""  # at its end, because no process has it open
        finally:
            process.kill()
    left = machine.cache / "building-x" / "left"
    left.parent.mkdir(exist_ok=True)
    left.touch()
    machine.install("cc", WORKING)
    path = machine.build()
    assert {entry.name for entry in machine.cache.iterdir()} == {"lock", path.parent.name}
