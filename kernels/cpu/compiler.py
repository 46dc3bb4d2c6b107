"""Finding a C compiler for the kernels, and running it so that it never outlives this process.

A compiler must not continue after this process was interrupted. Each compiler therefore runs in its own session, next
to a watcher that reads from a pipe of this process. However this process ends, the pipe is closed, and the watcher then
kills the session.
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

# Compilers to try after the one that the user named.
NAMES = ("cc", "gcc", "clang")
_WRAPPERS = ("ccache", "distcc", "icecc", "sccache")
_TIMEOUT_S = 300
# The pipe is the shell's standard input. `read` returns when the pipe is closed, and nothing is ever written to it.
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
# A program that needs the same features of the compiler and its libraries as the kernels do.
_TRIAL = "#include <math.h>\n#include <omp.h>\nint num_threads(void) { return omp_get_max_threads(); }\n"
_NO_MEMORY = re.compile(r"Killed|memory exhausted|out of memory|Cannot allocate memory|bad_alloc", re.IGNORECASE)
_INTERRUPTED = re.compile(
    r"\b(Hangup|Interrupt|Terminated)\b|Cannot fork|temporarily unavailable|Too many open files|Input/output error"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_MAX_REASON = 240


class BuildError(Exception):
    """Raised if the CPU kernels cannot be compiled or loaded on this machine. The message gives the reason."""


class NoMemoryError(BuildError):
    """Raised if the CPU kernels cannot be compiled because memory ran out."""


class TransientError(BuildError):
    """Raised if the C compiler failed for a temporary reason, such as an interruption. A later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that exists on this machine and answered `--version`.

    Attributes:
        name: the name under which it was found, such as "gcc".
        command: the command line that runs it, beginning with the program's path.
        version: its output for `--version`.
    """

    name: str
    command: tuple[str, ...]
    version: str

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The compiler flags for linking the kernels into a shared library.

        With GCC, -fopenmp is left out, so that the library does not load an OpenMP runtime of its own. clang needs the
        flag, because its code can only call its own runtime.
        """
        return ("-lm", "-fopenmp") if "clang" in self.version else ("-lm",)

    def compile(self, flags: Sequence[str], pipe: int, source: Path, target: Path) -> None:
        """Compile a C source file to an object file. `pipe` is the reading end of a pipe from `open_pipe`. Raises
        BuildError if the compiler fails and OSError if the disk is full."""
        run([*self.command, *flags, "-c", "-o", str(target), str(source)], pipe, target.parent)

    def link(self, objects: Sequence[Path], target: Path, pipe: int) -> None:
        """Link object files into a shared library. `pipe` is the reading end of a pipe from `open_pipe`. Raises
        BuildError if the compiler fails and OSError if the disk is full."""
        run([*self.command, "-shared", "-o", str(target), *map(str, objects), *self.link_flags], pipe, target.parent)

    def test_build(self, flags: Sequence[str], folder: Path, pipe: int) -> None:
        """Build a trivial library with these flags in `folder`, to test whether the compiler works. Raises BuildError
        if the compiler fails and OSError if the disk is full."""
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
    """Yield the C compilers that work on this machine: first the compiler `named` by the user, then cc, gcc and clang.
    `named` is split into words as a shell would split it.

    A compiler is not run before the caller asks for it. If a name does not work, the reason is stored in `refusals`. A
    compiler that has several names is yielded once.
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
    """Return the real path of a compiler's program, so that `find_compilers` recognises one compiler under two names. A
    wrapper such as ccache keeps its own path, because it runs a different compiler for each of its names."""
    real = os.path.realpath(path)
    return path if os.path.basename(real) in _WRAPPERS else real


def describe_refusals(refusals: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals.items())


@contextmanager
def open_pipe() -> Iterator[tuple[int, BinaryIO]]:
    """Open a pipe that kills running compilers when it is closed, for example because this process ends. Yield the
    reading end and the writing end. `run` passes the reading end to a watcher process of each compiler. When the
    writing end is closed, all compilers that run with this pipe are killed. A compiler that starts afterwards is killed
    too."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as writer:
            yield reading, writer
    finally:
        os.close(reading)


def run(command: Sequence[str], pipe: int, folder: Path | None = None) -> str:
    """Run a compiler command and return its output. `pipe` is the reading end of a pipe from `open_pipe`. `folder` is
    the compiler's directory for temporary files.

    Raises BuildError with a short reason if the compiler fails or takes longer than 300 s. Raises OSError if the disk
    is full.
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
        raise TransientError(f"does not run: {error}") from error
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
    # The signal that ended the shell, or the signal that the shell reports for the compiler as 128 + number.
    number = -status if status < 0 else status - 128
    if number == signal.SIGKILL or _NO_MEMORY.search(said):
        return NoMemoryError("ran out of memory")
    if _NO_SPACE.search(said):
        return OSError(errno.ENOSPC, reason)
    is_passing = number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) or _INTERRUPTED.search(said)
    return (TransientError if is_passing else BuildError)(reason[:_MAX_REASON])
