"""Loads the C kernels beside this module, in the widest variant that the processor runs.

A variant is the same code on every machine: it is built by flags of its own, never for "this processor". A platform's
wheel brings all variants (`deploy/platform_wheel.py`); elsewhere the system's compiler builds the one that is needed,
once per machine and source, into the user's cache, under a hash of everything that goes into it. A library ends with
the digest of what stands before, which is compared before it is loaded: one that was cut or overwritten would end the
process, or compute something else.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
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
_TIMEOUT_S = 300
_DIGEST_BYTES = hashlib.sha256().digest_size


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the text says why."""


@dataclass(frozen=True, slots=True)
class Build:
    """How the kernels are built.

    Attributes:
        variant: "native" for the widest one that this processor runs, or one of VARIANTS.
        compiler: name or path of the C compiler; None: the first of cc, gcc and clang that there is.
        cache: where libraries are kept; None: there is no place for them, and they cannot be built.
    """

    variant: str = NATIVE
    compiler: str | None = None
    cache: Path | None = None


def load_library(build: Build) -> ctypes.CDLL:
    """The kernels: those that came with the package, else built now if they are not in the cache. Raises BuildError."""
    variant = choose_variant(build.variant)
    path = BUILT / f"{variant}.so"
    if not is_sealed(path):
        path = build_library(build, flags_of(variant))
    try:
        _share_openmp()
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}; {_remedy(path)}") from error


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
    compiler = find_compiler(build.compiler)
    version = _run([compiler, "--version"])
    if build.cache is None:
        raise BuildError("this user has no home for what is built; set PAGEWIRE_CACHE to a folder")
    path = build.cache / _digest(compiler, version, flags) / "kernels.so"
    if is_sealed(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_sealed(path):
                if path.exists():
                    logger.warning("%s is not what was built: building it again", path)
                _compile(compiler, [*flags, *_QUIET_FLAGS], path)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error}; set PAGEWIRE_CACHE to another folder") from error
    return path


def seal(path: Path) -> None:
    """Append to a file the digest of what it holds, where loaders of libraries do not look."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def is_sealed(path: Path) -> bool:
    """Whether there is a file that holds what it was sealed with."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def find_compiler(name: str | None = None) -> str:
    """The C compiler of that name, or the first of cc, gcc and clang that there is. Raises BuildError."""
    names = [name] if name else ["cc", "gcc", "clang"]
    for candidate in names:
        found = shutil.which(candidate)
        if found:
            return found
    raise BuildError(f"there is no C compiler ({', '.join(names)}); install one, for example gcc")


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    # A warning, since it is all that is heard of a start that takes a minute.
    logger.warning("compiling the CPU kernels, which takes about a minute, once on this machine")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, built = Path(folder) / "kernels.o", Path(folder) / path.name
        _run([compiler, *flags, "-c", "-o", str(compiled), str(SOURCES / MAIN_SOURCE)])
        # Without -fopenmp, so that the library asks for no OpenMP runtime of its own; clang can call no other.
        runtime = ["-fopenmp"] if "clang" in _run([compiler, "--version"]) else []
        _run([compiler, "-shared", "-o", str(built), str(compiled), "-lm", *runtime])
        seal(built)
        built.rename(path)


def _share_openmp() -> None:
    """Lets the kernels find torch's OpenMP runtime, whose file may have a name of its own, and share its threads.

    Raises OSError if there is none.
    """
    folder = Path(torch.__file__).parent
    found = [path for place in (folder / "lib", folder.parent / "torch.libs") for path in place.glob("libgomp*.so*")]
    ctypes.CDLL(str(min(found, default="libgomp.so.1")), ctypes.RTLD_GLOBAL)


def _digest(compiler: str, version: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in (compiler, version, *flags, platform.machine()):
        digest.update(f"{len(text)}:{text}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _features() -> frozenset[str]:
    """Return what the processor has, as Linux names it; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names = [line.partition(":")[2] for line in lines if line.partition(":")[0].strip() in ("flags", "Features")]
    return frozenset(names[0].split()) if names else frozenset()


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
