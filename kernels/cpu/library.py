"""Loading the C kernels, in the widest variant that the processor runs.

A variant is the same code on every machine. It has its own compiler flags and is never compiled for "this processor". A
platform's wheel contains all variants (`deploy/platform_wheel.py`). Elsewhere the system's compiler builds the needed
variant, once per machine and source, in the user's cache.

The path of a library is CACHE/SOURCES/COMPILER.so. SOURCES is a hash of the sources, the flags and the architecture,
and COMPILER is a hash of the compiler. If no compiler works any more, the loader uses a library that another compiler
has built from the same sources. Builds run in CACHE/building-*, under the lock of the cache. The next process that gets
the lock deletes leftovers of earlier builds.

A failed build writes its reason to COMPILER.failed in the folder of the library. For an hour, further starts report
this reason and do not compile again. A build that was interrupted or found the disk full writes no such file.

A library file ends with the digest of its preceding bytes. The digest is checked before the library is loaded, because
a truncated or overwritten library could crash the process or compute wrong results.
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

# torch is imported before the library is loaded, so that both share one OpenMP runtime and its threads.
import torch

from pagewire.kernels.cpu.abi import ffi
from pagewire.kernels.cpu.compiler import (
    BuildError,
    Compiler,
    NoMemoryError,
    TransientError,
    describe_refusals,
    find_compilers,
    open_pipe,
)

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
# The only deviation from IEEE arithmetic is contraction into fused multiply-adds. NaN and infinities must propagate.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC")
NATIVE = "native"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_BFLOAT16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_TILES = ("amx_tile", "amx_int8")
# The arguments of the system call `arch_prctl` that lets a process use the tile registers of AMX.
_PERMIT_TILES = (158, 0x1023, 18)
# The processor features that each variant needs, under their Linux names. Wider variants come later. The features of an
# architecture's variants do not exist on processors of another architecture.
VARIANTS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _BFLOAT16,
    "amx_int8": (*_BFLOAT16, *_TILES),
    "dotprod": ("asimddp",),
}
# The variants that compilers older than the processor may not build, and what is used instead.
_NARROWER = {"amx_int8": "avx512_bf16"}
# The flags of the variants that exist for AArch64.
AARCH64_FLAGS = {"portable": "-march=armv8-a", "dotprod": "-march=armv8.2-a+dotprod"}
# The folder in which a platform's wheel stores the libraries, as `VARIANT.so`.
BUILT = Path(__file__).parent / "built"
_QUIET_FLAGS = ("-Wno-psabi", "-Wno-unknown-pragmas")
_WAITING = "waiting for another process that compiles the CPU kernels"
_FAILURE_S = 3600.0  # for this time a failed build is not tried again
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Build:
    """The settings for compiling and loading the C kernels for CPUs.

    Attributes:
        variant: "native" for the widest variant that this processor runs, or one of VARIANTS.
        compiler: the command of a C compiler to try before cc, gcc and clang; None means that only these three are
            tried.
        cache: the folder in which libraries are stored; None means that there is no such folder, and nothing can be
            compiled.
        num_jobs: the number of source files to compile at the same time.
        tell: receives progress messages of the build, such as the number of compiled units.
    """

    variant: str = NATIVE
    compiler: str | None = None
    cache: Path | None = None
    num_jobs: int = field(default=1, compare=False)  # the library is the same
    tell: Callable[[str], object] = field(default=lambda doing: None, compare=False)


class Library(NamedTuple):
    """The loaded shared library of the C kernels: the functions that abi.h declares, and the path of the file."""

    functions: Any
    path: Path


def load_library(build: Build) -> Library:
    """Load the shared library of the C kernels. Use the library that the package contains, else a library in the cache
    folder, else compile one now. Raises BuildError if no library can be compiled or loaded.

    If the variant is "native" and no compiler knows the instructions of the widest, the next is used."""
    path = _find_or_build(build, choose_variant(build.variant))
    try:
        _share_openmp()
        # Never unloaded, because threads may still run its code when the process ends.
        functions = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_NODELETE)
        others = [name for name in ffi.list_types()[0] if functions.size_of(name.encode()) != ffi.sizeof(name)]
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} does not load: {error}; {_remedy(path)}") from error
    if others:
        raise BuildError(
            f"{path} was built from another version: the sizes differ for {', '.join(others)}; {_remedy(path)}"
        )
    return Library(functions, path)


def _find_or_build(build: Build, variant: str) -> Path:
    path = BUILT / f"{variant}.so"
    if is_sealed(path):
        return path
    try:
        return build_library(build, flags_of(variant))
    except (NoMemoryError, TransientError):
        raise
    except BuildError as error:
        if build.variant != NATIVE or variant not in _NARROWER:
            raise
        try:
            path = _find_or_build(build, _NARROWER[variant])
        except BuildError:
            raise error from None  # no compiler works
        logger.warning("the CPU kernels use %s instead of %s: %s", _NARROWER[variant], variant, error)
        return path


def _remedy(path: Path) -> str:
    """Return advice for the operator, to be added to the error message about a library file that cannot be loaded."""
    if os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
        return f"{path.parent} is mounted noexec: mount it without that, or set PAGEWIRE_CACHE to a folder elsewhere"
    return "remove it, and the next start builds it again"


def choose_variant(name: str) -> str:
    """Return the name of the kernel variant (instruction set) to use. If `name` is "native", choose the widest variant
    that this processor runs.

    Raises BuildError if this processor lacks a feature that the variant needs.
    """
    features = _features()
    if name == NATIVE:
        return [variant for variant, needed in VARIANTS.items() if features.issuperset(needed)][-1]
    missing = sorted(set(VARIANTS[name]) - features)
    if missing:
        raise BuildError(f"this processor does not run the variant {name}: it has no {', '.join(missing)}")
    return name


def flags_of(variant: str, machine: str | None = None) -> tuple[str, ...]:
    """Return the C compiler flags for a kernel variant on the architecture `machine`, by default this machine's
    architecture."""
    machine = machine or platform.machine()
    if machine == "aarch64":
        return (*FLAGS, AARCH64_FLAGS[variant])
    # A distribution's compiler may assume more features than the architecture's baseline has.
    baseline = ["-march=x86-64"] if machine == "x86_64" else []
    names = (feature.replace("_", "-" if feature in _TILES else "") for feature in VARIANTS[variant])
    return (*FLAGS, *baseline, *("-m" + name for name in names))


def build_library(build: Build, flags: Sequence[str]) -> Path:
    """Return the path of the kernel library for these compiler flags in the cache folder. Compile the library if it
    does not exist.

    If another process is already building, wait for it. Raises BuildError if there is no cache folder or compilation
    fails.
    """
    if build.cache is None:
        raise BuildError("there is no cache folder, because this user has no home; set PAGEWIRE_CACHE to a folder")
    place = build.cache / _digest(flags)
    try:
        return _build_by_first(place, flags, build)
    except BuildError as error:
        earlier = next(filter(is_sealed, place.glob("*.so")), None)
        if earlier is None:
            raise
        logger.info("using CPU kernels that another compiler has built: %s", error)
        return earlier


def _build_by_first(place: Path, flags: Sequence[str], build: Build) -> Path:
    """Return the path of the kernel library in the folder `place` that was built with the first working compiler.
    Compile the library if it does not exist.

    Raises BuildError if no compiler works or compilation fails.
    """
    refusals: dict[str, str] = {}
    # Compilers are tried one by one: if the first compiler's library exists, no other compiler is run.
    for compiler in find_compilers(build.compiler, refusals):
        path = place / f"{_digest_of(*compiler.command, compiler.version, *compiler.link_flags)}.so"
        if _is_built(path) or _build(compiler, flags, build, path, refusals):
            return path
    raise BuildError(f"there is no C compiler that works ({describe_refusals(refusals)}); install one, for example gcc")


def _is_built(path: Path) -> bool:
    """Return whether the kernel library exists at `path` and is intact. Raises BuildError if building the library
    failed within the last hour."""
    if is_sealed(path):
        return True
    failure = path.with_suffix(".failed")
    try:
        reason, age = failure.read_text(errors="replace"), time.time() - failure.stat().st_mtime
    except OSError:
        return False
    # a crash may leave the file empty, and its time may lie ahead of a reset clock
    if reason and 0 <= age < _FAILURE_S:
        raise BuildError(
            f"{reason}, {age / 60:.0f} min ago; it is tried again an hour after that, or once {failure} is removed"
        )
    return False


def _build(compiler: Compiler, flags: Sequence[str], build: Build, path: Path, refusals: dict[str, str]) -> bool:
    """Build the kernel library with one compiler and return True. Return False if the compiler cannot even build a
    trivial library.

    If the result is False, `refusals` receives the reason. Raises BuildError if the cache folder cannot be written, or
    if compiling the kernels fails.
    """
    cache = path.parents[1]
    try:
        with _building(cache, build.tell) as folder:
            return _is_built(path) or _compile(compiler, flags, build, folder, path, refusals)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(f"{cache} is full: make room, or set PAGEWIRE_CACHE to another folder") from error
        raise BuildError(f"cannot write to {cache}: {error}; set PAGEWIRE_CACHE to another folder") from error


def seal(path: Path) -> None:
    """Append the SHA-256 of a library file's content to the file, so that damage can be detected. Library loaders
    ignore bytes at the end."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def is_sealed(path: Path) -> bool:
    """Return whether a library file exists and is intact: it must end with the SHA-256 digest of its preceding
    bytes."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


@contextmanager
def _building(cache: Path, tell: Callable[[str], object]) -> Iterator[Path]:
    """Create a temporary folder for building the kernels. Hold a lock until the `with` block ends, so that only one
    process builds at a time. Yield the path of the folder.

    Folders of processes that were killed during a build are removed first. The compilers of such a process may still
    run for a while and write to its folder.
    """
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
    """Open the lock file of the build cache and return the file descriptor. The file is opened for writing if
    permitted, else for reading.

    NFS can lock only files that are open for writing. Other file systems can also lock a file that another user owns
    and that is open only for reading.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _compile(
    compiler: Compiler, flags: Sequence[str], build: Build, folder: Path, path: Path, refusals: dict[str, str]
) -> bool:
    """Compile and link the kernel library in `folder`, move it to `path`, and return True.

    Return False if the compiler cannot build a trivial library. Raises BuildError if it fails later. Such a failure is
    recorded in the .failed file, unless it is temporary.
    """
    built = folder / path.name
    # The writer is closed first, which kills running compilers. Only then does the pool wait for its threads.
    with open_pipe() as (pipe, writer), ThreadPoolExecutor(build.num_jobs) as pool, writer:
        try:
            compiler.test_build(flags, folder, pipe)
        except BuildError as error:
            refusals[compiler.name] = str(error)
            return False
        if path.exists():
            logger.warning("%s is damaged: building it again", path)
        # Logged as a warning, because this line is the only sign that the slow start is making progress.
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
            # With one job at a time, less memory is needed. The next start uses one job if memory is still short, so
            # lack of memory is not recorded for several jobs.
            if not isinstance(error, TransientError if build.num_jobs == 1 else (TransientError, NoMemoryError)):
                with suppress(OSError):  # the compiler's error matters more
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
    """Return the paths of the C source files of the kernels, in alphabetical order."""
    return sorted(SOURCES.glob("*.c"))


def _share_openmp() -> None:
    """Load torch's OpenMP runtime, whose file name may vary, so that the C kernels find it and share its threads.

    Raises OSError if no OpenMP runtime is found.
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
    """Return the processor's features (such as "avx2") under their Linux names, without those that Linux does not let
    this process use. Return an empty set if Linux does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names = [line.partition(":")[2] for line in lines if line.partition(":")[0].strip() in ("flags", "Features")]
    found = frozenset(names[0].split()) if names else frozenset()
    may_use_tiles = found.issuperset(_TILES) and ctypes.CDLL(None).syscall(*_PERMIT_TILES) == 0
    return found if may_use_tiles else found.difference(_TILES)
