"""Builds the C sources beside this module with the system's compiler, once per machine and source, and loads them.

The libraries lie in the user's cache under a hash of everything that goes into them, the processor's flags included, so
that a cache that moves to another machine is not used there.
"""

import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Before the library, so that both share one OpenMP runtime and its threads.
import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
MAIN_SOURCE = "kernels.c"
# Contraction into fused multiply-adds is all that is given up of IEEE arithmetic: NaN and infinities must come through.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
NATIVE = "native"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# What an x86 processor must have, as Linux names it, by the name that `CpuKernels.variant` has for the result.
VARIANTS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
}
_QUIET_FLAGS = ("-Wno-psabi", "-Wno-unknown-pragmas")
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the text says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """How the kernels are built.

    Attributes:
        variant: "native" for all that this processor has, or one of VARIANTS.
        compiler: name or path of the C compiler; None: the first of cc, gcc and clang that there is.
        cache: where libraries are kept; None: there is no place for them, and they cannot be built.
    """

    variant: str = NATIVE
    compiler: str | None = None
    cache: Path | None = None


def load_library(build: Build) -> ctypes.CDLL:
    """The kernels, built now if they are not in the cache. Raises BuildError."""
    path = build_library(build, flags_of(build.variant))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}; remove it to have it built again") from error


def flags_of(variant: str) -> tuple[str, ...]:
    """The compiler's flags for a variant. Raises BuildError if this processor would not run what they give."""
    if variant == NATIVE:
        return (*FLAGS, "-march=native")
    needed = VARIANTS[variant]
    missing = sorted(set(needed) - set(_processor().get("flags", "").split()))
    if missing:
        raise BuildError(f"this processor does not run the variant {variant}: it has no {', '.join(missing)}")
    # A distribution's compiler may take more than the architecture's baseline for granted.
    baseline = ["-march=x86-64"] if platform.machine() == "x86_64" else []
    return (*FLAGS, *baseline, *("-m" + feature.replace("_", "") for feature in needed))


def build_library(build: Build, flags: Sequence[str]) -> Path:
    """Return the path of the library of these flags, built if it is missing. A second process waits for the first.
    Raises BuildError."""
    compiler = find_compiler(build.compiler)
    openmp = _torch_openmp()
    version = _run([compiler, "--version"])
    if build.cache is None:
        raise BuildError("this user has no home for what is built; set PAGEWIRE_CACHE to a folder")
    path = build.cache / _digest(compiler, version, [*flags, *openmp]) / "kernels.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(compiler, [*flags, *_QUIET_FLAGS], openmp, path)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error}; set PAGEWIRE_CACHE to another folder") from error
    return path


def find_compiler(name: str | None = None) -> str:
    """The C compiler of that name, or the first of cc, gcc and clang that there is. Raises BuildError."""
    names = [name] if name else ["cc", "gcc", "clang"]
    for candidate in names:
        found = shutil.which(candidate)
        if found:
            return found
    raise BuildError(f"there is no C compiler ({', '.join(names)}); install one, for example gcc")


def _compile(compiler: str, flags: Sequence[str], openmp: Sequence[str], path: Path) -> None:
    # A warning, since it is all that is heard of a start that takes a minute.
    logger.warning("compiling the CPU kernels, which takes about a minute, once on this machine")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        _run([compiler, *flags, "-o", str(built), str(SOURCES / MAIN_SOURCE), "-Wl,--as-needed", *openmp, "-lm"])
        built.rename(path)


def _torch_openmp() -> list[str]:
    """The OpenMP runtime that torch brings. Its file may have a name of its own, so it is named to the linker."""
    folder = Path(torch.__file__).parent
    found = [path for place in (folder / "lib", folder.parent / "torch.libs") for path in place.glob("libgomp*.so*")]
    return [str(path) for path in sorted(found)[:1]]


def _digest(compiler: str, version: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in (compiler, version, *flags, platform.machine(), repr(sorted(_processor().items()))):
        digest.update(f"{len(text)}:{text}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> dict[str, str]:
    """Return the properties of the processor that decide about -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {"name": platform.processor()}
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            first.setdefault(name.strip(), value.strip())
    return first


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError(f"{command[0]} failed with {done.returncode}: {' / '.join(output[:5])}")
    return done.stdout
