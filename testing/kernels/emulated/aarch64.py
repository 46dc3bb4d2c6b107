"""The C kernels for AArch64, built by a cross compiler and executed by qemu."""

import functools
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path

from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.cpu.library import VARIANTS, Library, build_library, flags_of
from testing.kernels.emulated.library import EmulatedLibrary
from worker_service.startup.cpu_kernels import environment_build

MACHINE = "aarch64"
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
SYSTEM_ROOT = Path("/usr/aarch64-linux-gnu")
# The packages that contain these tools.
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
# Processors of the emulator, and the features of variants that each has.
PROCESSORS = {"cortex-a53": frozenset[str](), "neoverse-n1": frozenset({"asimddp"})}
_GUEST = Path(__file__).parent / "guest.c"


def missing_tools() -> str | None:
    """Return the reason why emulation is not possible, with the packages to install; None if all tools are
    available."""
    missing = [name for name in (COMPILER, EMULATOR) if not shutil.which(name)]
    missing += [] if (SYSTEM_ROOT / "lib").exists() else [str(SYSTEM_ROOT / "lib")]
    if not sysconfig.get_platform().endswith("x86_64"):
        return f"pages are shared with {EMULATOR} on x86_64 alone, and this is {sysconfig.get_platform()}"
    return f"there is no {', '.join(missing)}: apt-get install {PACKAGES}" if missing else None


def load_emulated(variant: str, processor: str) -> CpuKernels:
    """Load a variant on an emulated processor. The errors are the same as for `open_emulated`."""
    return CpuKernels(open_emulated(variant, processor))


@functools.cache
def open_emulated(variant: str, processor: str) -> Library:
    """Build a variant and open it on an emulated processor.

    Raises ValueError if the processor cannot run the variant, and BuildError if the build fails.
    """
    lacking = set(VARIANTS[variant]) - PROCESSORS[processor]
    if lacking:
        raise ValueError(f"{processor} does not run the variant {variant}: it has no {', '.join(sorted(lacking))}")
    build = replace(environment_build(), compiler=COMPILER)
    path = build_library(build, flags_of(variant, MACHINE))
    command = [EMULATOR, "-cpu", processor, "-L", str(SYSTEM_ROOT), str(_build_guest()), str(path)]
    return Library(EmulatedLibrary(command), path)


@functools.cache
def _build_guest() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pagewire-guest-"))
    # The library uses the OpenMP runtime and the memset of the program that loads it.
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-fopenmp", "-rdynamic", "-Wl,--no-as-needed"]
    subprocess.run([COMPILER, *options, "-o", str(folder / "guest"), str(_GUEST), "-ldl"], check=True)
    return folder / "guest"
