"""Loads the C kernels beside this module, in the widest variant that the processor runs.

A variant is the same code on every machine: it is built by flags of its own, never for "this processor". A platform's
wheel brings all variants (`deploy/platform_wheel.py`); elsewhere the system's compiler builds the one that is needed,
once per machine and source, into the user's cache: CACHE/SOURCES/COMPILER.so, both hashes, the first of the sources,
the flags and the architecture. Where no compiler works any more, what an earlier one made of the same is taken. What is
being made lies in CACHE/building-*, under the lock of the cache, and the next to take the lock empties it.

A build that failed leaves its reason beside where the library would be, COMPILER.failed: for an hour no start pays for
it again. One that was interrupted, or found the disk full, leaves none.

A library ends with the digest of what stands before, which is compared before it is loaded: one that was cut or
overwritten would end the process, or compute something else.
"""

import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Before the library, so that both share one OpenMP runtime and its threads.
import torch

from pagewire.kernels.cpu.abi import ffi
from pagewire.kernels.cpu.compiler import (
    BuildError,
    Compiler,
    NoMemoryError,
    PassingError,
    describe_refusals,
    find_compilers,
    open_pipe,
)

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
# Contraction into fused multiply-adds is all that is given up of IEEE arithmetic: NaN and infinities must come through.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC")
NATIVE = "native"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# What a processor must have, as Linux names it, by the name that `CpuKernels.variant` has for the result. Wider ones
# come later; those of one architecture need what no processor of another has.
VARIANTS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "dotprod": ("asimddp",),
}
# The variants that AArch64 has, and their flags.
AARCH64_FLAGS = {"portable": "-march=armv8-a", "dotprod": "-march=armv8.2-a+dotprod"}
# Where a platform's wheel has the libraries, `VARIANT.so`.
BUILT = Path(__file__).parent / "built"
_QUIET_FLAGS = ("-Wno-psabi", "-Wno-unknown-pragmas")
_WAITING = "waiting for another process that compiles the CPU kernels"
_FAILURE_S = 3600.0  # for which a failed build is not tried again
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Build:
    """How the kernels are built.

    Attributes:
        variant: "native" for the widest one that this processor runs, or one of VARIANTS.
        compiler: the command of the C compiler that is tried before cc, gcc and clang; None: these alone.
        cache: where libraries are kept; None: there is no place for them, and they cannot be built.
        num_jobs: how many units of translation are compiled at the same time.
        tell: hears how far that is, or what it waits for.
    """

    variant: str = NATIVE
    compiler: str | None = None
    cache: Path | None = None
    num_jobs: int = field(default=1, compare=False)  # the library is the same
    tell: Callable[[str], object] = field(default=lambda doing: None, compare=False)


class Library(NamedTuple):
    """The functions of abi.h, and the file that has them."""

    functions: Any
    path: Path


def load_library(build: Build) -> Library:
    """The kernels: those that came with the package, else built now if they are not in the cache. Raises BuildError."""
    variant = choose_variant(build.variant)
    path = BUILT / f"{variant}.so"
    if not is_sealed(path):
        path = build_library(build, flags_of(variant))
    try:
        _share_openmp()
        # Never unloaded: threads may be in it when the process ends.
        functions = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
        others = [name for name in ffi.list_types()[0] if functions.size_of(name.encode()) != ffi.sizeof(name)]
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} does not load: {error}; {_remedy(path)}") from error
    if others:
        raise BuildError(f"{path} is of another version, by its {', '.join(others)}; {_remedy(path)}")
    return Library(functions, path)


def _remedy(path: Path) -> str:
    """Say what to do about a library that does not load."""
    if os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
        return f"{path.parent} is mounted noexec: mount it without that, or set PAGEWIRE_CACHE to a folder elsewhere"
    return "remove it to have it built again"


def choose_variant(name: str) -> str:
    """The variant of that name; "native" is the widest one that this processor runs. Raises BuildError if it would not
    run it."""
    features = _features()
    if name == NATIVE:
        return [variant for variant, needed in VARIANTS.items() if features.issuperset(needed)][-1]
    missing = sorted(set(VARIANTS[name]) - features)
    if missing:
        raise BuildError(f"this processor does not run the variant {name}: it has no {', '.join(missing)}")
    return name


def flags_of(variant: str, machine: str | None = None) -> tuple[str, ...]:
    """The compiler's flags for one of the variants that an architecture has, by default this machine's."""
    machine = machine or platform.machine()
    if machine == "aarch64":
        return (*FLAGS, AARCH64_FLAGS[variant])
    # A distribution's compiler may take more than the architecture's baseline for granted.
    baseline = ["-march=x86-64"] if machine == "x86_64" else []
    return (*FLAGS, *baseline, *("-m" + feature.replace("_", "") for feature in VARIANTS[variant]))


def build_library(build: Build, flags: Sequence[str]) -> Path:
    """Return the path of the library of these flags, built if it is missing. A second process waits for the first.
    Raises BuildError."""
    if build.cache is None:
        raise BuildError("this user has no home for what is built; set PAGEWIRE_CACHE to a folder")
    place = build.cache / _digest(flags)
    try:
        return _build_by_first(place, flags, build)
    except BuildError as error:
        earlier = next(filter(is_sealed, place.glob("*.so")), None)
        if earlier is None:
            raise
        logger.info("taking the CPU kernels that another compiler has made: %s", error)
        return earlier


def _build_by_first(place: Path, flags: Sequence[str], build: Build) -> Path:
    """Return the path in the folder of the first compiler's library that works, built if it is missing. Raises
    BuildError."""
    refusals: dict[str, str] = {}
    # One by one: a start that finds the library of the first has run no other.
    for compiler in find_compilers(build.compiler, refusals):
        path = place / f"{_digest_of(*compiler.command, compiler.version, *compiler.link_flags)}.so"
        if _is_built(path) or _build(compiler, flags, build, path, refusals):
            return path
    raise BuildError(f"there is no C compiler that works ({describe_refusals(refusals)}); install one, for example gcc")


def _is_built(path: Path) -> bool:
    """Whether the library is there. Raises BuildError if building it has failed within the hour."""
    if is_sealed(path):
        return True
    failure = path.with_suffix(".failed")
    try:
        reason, age = failure.read_text(errors="replace"), time.time() - failure.stat().st_mtime
    except OSError:
        return False
    if reason and 0 <= age < _FAILURE_S:  # an interrupt of the machine may leave it empty, a clock that is set be ahead
        raise BuildError(
            f"{reason}, {age / 60:.0f} min ago; it is tried again an hour after that, or once {failure} is removed"
        )
    return False


def _build(compiler: Compiler, flags: Sequence[str], build: Build, path: Path, refusals: dict[str, str]) -> bool:
    """Build the library, unless the compiler does not even build a trivial one: `refusals` gets why. Raises
    BuildError."""
    cache = path.parents[1]
    try:
        with _building(cache, build.tell) as folder:
            return _is_built(path) or _compile(compiler, flags, build, folder, path, refusals)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(f"{cache} is full: make room, or set PAGEWIRE_CACHE to a folder elsewhere") from error
        raise BuildError(f"cannot write to {cache}: {error}; set PAGEWIRE_CACHE to another folder") from error


def seal(path: Path) -> None:
    """Append to a file the digest of what it holds, where loaders of libraries do not look."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def is_sealed(path: Path) -> bool:
    """Whether there is a file that holds what it was sealed with."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@contextmanager
def _building(cache: Path, tell: Callable[[str], object]) -> Iterator[Path]:
    """A folder for one process at a time. What one that was killed has left is removed; its compilers may still write
    to that, as they end."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = _open_lock(cache / "lock")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning(_WAITING)
            tell(_WAITING)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob("building*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """NFS locks what may be written alone; other file systems lock also what belongs to another user."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _compile(
    compiler: Compiler, flags: Sequence[str], build: Build, folder: Path, path: Path, refusals: dict[str, str]
) -> bool:
    """Build the library in the folder, and move it to its path. What fails after the trial is remembered."""
    built = folder / path.name
    # The writer is closed first, which ends what still runs, and then the pool waits for its threads.
    with open_pipe() as (pipe, writer), ThreadPoolExecutor(build.num_jobs) as pool, writer:
        try:
            compiler.try_out(flags, folder, pipe)
        except BuildError as error:
            refusals[compiler.name] = str(error)
            return False
        if path.exists():
            logger.warning("%s is not what was built: building it again", path)
        # A warning, since it is all that is heard of a start that takes so long.
        logger.warning(
            "compiling the CPU kernels with %s, once on this machine%s",
            " ".join(compiler.command),
            f" ({describe_refusals(refusals)})" if refusals else "",
        )
        path.parent.mkdir(exist_ok=True)
        objects = [folder / f"{source.stem}.o" for source in sources()]
        units = [
            pool.submit(compiler.compile, [*flags, *_QUIET_FLAGS], pipe, source, compiled)
            for source, compiled in zip(sources(), objects, strict=True)
        ]
        try:
            build.tell(f"compiling the CPU kernels: 0 of {len(units)} units")
            for num_done, unit in enumerate(as_completed(units), 1):
                unit.result()
                done = f"compiling the CPU kernels: {num_done} of {len(units)} units"
                build.tell(done)
                logger.warning("%s", done)
            compiler.link(objects, built, pipe)
        except BuildError as error:
            reason = f"{compiler.name} {error}"
            # Of several compilers at a time there is one the next time, if the memory is still wanted elsewhere.
            if not isinstance(error, PassingError if build.num_jobs == 1 else (PassingError, NoMemoryError)):
                with suppress(OSError):  # the compiler's reason is what counts
                    path.with_suffix(".failed").write_text(reason)
            raise BuildError(reason) from error
        finally:
            for unit in units:
                unit.cancel()
    seal(built)
    built.rename(path)
    path.with_suffix(".failed").unlink(missing_ok=True)
    return True


def sources() -> list[Path]:
    """The units of translation."""
    return sorted(SOURCES.glob("*.c"))


def _share_openmp() -> None:
    """Lets the kernels find torch's OpenMP runtime, whose file may have a name of its own, and share its threads.

    Raises OSError if there is none.
    """
    folder = Path(torch.__file__).parent
    found = (path for place in (folder / "lib", folder.parent / "torch.libs") for path in place.glob("libgomp*.so*"))
    ctypes.CDLL(str(min(found, default="libgomp.so.1")), ctypes.RTLD_GLOBAL)


def _digest(flags: Sequence[str]) -> str:
    contents = (text for path in sorted(SOURCES.iterdir()) for text in (path.name, path.read_text("latin-1")))
    return _digest_of(*flags, platform.machine(), *contents)


def _digest_of(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _features() -> frozenset[str]:
    """Return what the processor has, as Linux names it; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names = [line.partition(":")[2] for line in lines if line.partition(":")[0].strip() in ("flags", "Features")]
    return frozenset(names[0].split()) if names else frozenset()
