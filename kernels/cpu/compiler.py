"""C compilers: which of those that are there builds the kernels, and running it so that it ends with this process.

A compiler that is interrupted must not go on by itself, so each runs in a session of its own beside a watcher that
reads a pipe of this process: however this process ends, the pipe is closed, and the watcher kills the session.
"""

import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# What is tried after the compiler that the user names.
NAMES = ("cc", "gcc", "clang")
_WRAPPERS = ("ccache", "distcc", "icecc", "sccache")
_TIMEOUT_S = 300
# The pipe is the standard input. `read` ends when it is closed, and nothing is ever written to it.
_WATCHED = """
LC_ALL=C TMPDIR=$1
export LC_ALL TMPDIR
shift
exec 3<&0 </dev/null
"$@" 3<&- &
compiler=$!
{ read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait $compiler
status=$?
kill $watcher
exit $status
"""
# What all the kernels need of a compiler and its libraries.
_TRIAL = "#include <math.h>\n#include <omp.h>\nint num_threads(void) { return omp_get_max_threads(); }\n"
_NO_MEMORY = re.compile(r"Killed|memory exhausted|out of memory|Cannot allocate memory|bad_alloc", re.IGNORECASE)
_INTERRUPTED = re.compile(
    r"\b(Hangup|Interrupt|Terminated)\b|Cannot fork|temporarily unavailable|Too many open files|Input/output error"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_MAX_REASON = 240


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the text says why."""


class NoMemoryError(BuildError):
    """The same, for want of memory."""


class PassingError(BuildError):
    """The same, of a compiler that might have succeeded a moment later."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that answers.

    Attributes:
        name: what the user may call it.
        command: what it is called by, the program's path first.
        version: what it says of itself.
    """

    name: str
    command: tuple[str, ...]
    version: str

    @property
    def link_flags(self) -> tuple[str, ...]:
        """No -fopenmp, so that a library asks for no OpenMP runtime of its own; but clang can call no other."""
        return ("-lm", "-fopenmp") if "clang" in self.version else ("-lm",)

    def compile(self, flags: Sequence[str], pipe: int, source: Path, target: Path) -> None:
        """Make an object of a source. Raises BuildError and OSError."""
        run([*self.command, *flags, "-c", "-o", str(target), str(source)], pipe, target.parent)

    def link(self, objects: Sequence[Path], target: Path, pipe: int) -> None:
        """Make a library of objects. Raises BuildError and OSError."""
        run([*self.command, "-shared", "-o", str(target), *map(str, objects), *self.link_flags], pipe, target.parent)

    def try_out(self, flags: Sequence[str], folder: Path, pipe: int) -> None:
        """Build a trivial library by these flags in a folder. Raises BuildError and OSError."""
        source, compiled = folder / "trial.c", folder / "trial.o"
        source.write_text(_TRIAL)
        try:
            self.compile(flags, pipe, source, compiled)
            self.link([compiled], folder / "trial.so", pipe)
        except BuildError as error:
            if "clang" in self.version and "omp" in str(error):
                raise BuildError("it has no OpenMP: install libomp-dev") from error
            raise


def find_compilers(named: str | None, refusals: dict[str, str]) -> Iterator[Compiler]:
    """Yield those that answer of the compiler that is named, as a shell would read that, and of cc, gcc and clang.

    Each is run only when it is its turn. `refusals` gets why those before it are none, by name. A compiler that has two
    names is one.
    """
    found: set[tuple[str, ...]] = set()
    for name in dict.fromkeys((named, *NAMES) if named and named.strip() else NAMES):
        try:
            program, *options = shlex.split(name)
            path = shutil.which(program)
            if path is None:
                raise BuildError(f"there is no {program}" if options else "not found")
            command, known = (path, *options), (_program(path), *options)
            if known in found:
                continue
            with open_pipe() as (pipe, _):
                version = run([*command, "--version"], pipe)
        except (BuildError, OSError, ValueError) as error:
            refusals[name] = str(error)
        else:
            found.add(known)
            yield Compiler(name, command, version)


def _program(path: str) -> str:
    """What a path leads to; but a wrapper of compilers is another one by each name."""
    real = os.path.realpath(path)
    return path if os.path.basename(real) in _WRAPPERS else real


def describe_refusals(refusals: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())


@contextmanager
def open_pipe() -> Iterator[tuple[int, BinaryIO]]:
    """The end of a pipe that compilers' watchers read, with the other end: once that is closed, what still runs is
    killed, and so is what starts."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as writer:
            yield reading, writer
    finally:
        os.close(reading)


def run(command: Sequence[str], pipe: int, folder: Path | None = None) -> str:
    """Run a compiler, which writes what it makes for itself to the folder, and return what it says.

    Raises BuildError with a short text, or OSError if there is no space for what it writes.
    """
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", str(folder or ""), *command],
            stdin=pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise PassingError(f"does not run: {error}") from error
    with process:
        try:
            said = process.communicate(timeout=_TIMEOUT_S)[0].decode(errors="replace")
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"has not ended in {_TIMEOUT_S} s") from error
            raise
    if process.returncode != 0:
        raise _error(process.returncode, said)
    return said


def _error(status: int, said: str) -> Exception:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line] or lines
    reason = ": ".join([f"failed with {status}", *telling[:1]])
    # The shell's own end, or what it says of the compiler's, which speaks of its parts.
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL or _NO_MEMORY.search(said):
        return NoMemoryError("was ended for want of memory")
    if _NO_SPACE.search(said):
        return OSError(errno.ENOSPC, reason)
    is_passing = number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) or _INTERRUPTED.search(said)
    return (PassingError if is_passing else BuildError)(reason[:_MAX_REASON])
