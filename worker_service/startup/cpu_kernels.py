"""Which kernels a CPU computes with, as the environment says: the one place of a worker that reads it for them.

`PAGEWIRE_CPU_KERNELS` says whether: "auto" (the default) uses them where they can be built, and says in one warning why
not; "off" does not; "require" raises instead. `PAGEWIRE_CPU_VARIANT` says which variant: "portable", "avx2", "avx512",
"avx512_bf16" or, on AArch64, "dotprod"; or "native" (the default) for the widest that this processor runs. `CC` names
the compiler. What is built is kept in `PAGEWIRE_CACHE`, by default the user's cache. So are weights that were quantised
for them, unless `PAGEWIRE_QUANTIZED_CACHE` names another folder, or is "off".
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pagewire.kernels.cpu import NATIVE, VARIANTS, Build, BuildError, CpuKernels, load_kernels
from worker_service.startup.resources import available_bytes, num_usable_cpus

_SWITCH = "PAGEWIRE_CPU_KERNELS"
_MODES = ("auto", "off", "require")
_VARIANT_SWITCH = "PAGEWIRE_CPU_VARIANT"
_COMPILER_BYTES = 256 << 20  # set aside for each that runs
_QUANTIZED_SWITCH = "PAGEWIRE_QUANTIZED_CACHE"


def load_cpu_kernels(tell: Callable[[str], object] = lambda doing: None) -> CpuKernels | None:
    """The kernels, or None where there are none. The first call may take seconds: it builds them, and tells of that.

    Raises ValueError if `PAGEWIRE_CPU_KERNELS` or `PAGEWIRE_CPU_VARIANT` is none of its values, or if the kernels are
    required and cannot be built.
    """
    mode, build = _choice(_SWITCH, _MODES), environment_build(tell)
    kernels = None if mode == "off" else load_kernels(build)
    if not isinstance(kernels, BuildError):
        return kernels
    if mode == "require":
        raise ValueError(f"{_SWITCH} is require: {kernels}") from kernels
    return None


def environment_build(tell: Callable[[str], object] = lambda doing: None) -> Build:
    """How the environment has the kernels built, of which `tell` hears. Raises ValueError if a variable is none of its
    values."""
    num_jobs = max(1, min(num_usable_cpus(), available_bytes() // _COMPILER_BYTES))
    return Build(
        _choice(_VARIANT_SWITCH, (NATIVE, *VARIANTS)), os.environ.get("CC"), cache_folder("kernels"), num_jobs, tell
    )


def _choice(name: str, choices: Sequence[str]) -> str:
    """The first of the choices where the environment does not say."""
    chosen = os.environ.get(name, choices[0])
    if chosen not in choices:
        raise ValueError(f"{name} is {chosen!r}; it must be one of {', '.join(choices)}")
    return chosen


def cache_folder(name: str) -> Path | None:
    """$PAGEWIRE_CACHE/NAME, by default in the user's cache; None where the user has no home."""
    root = os.environ.get("PAGEWIRE_CACHE")
    if root:
        return Path(root) / name
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / name
    except RuntimeError:
        return None


def quantized_folder() -> Path | None:
    """The folder of weights that were quantised at an earlier start; None where none shall be kept."""
    named = os.environ.get(_QUANTIZED_SWITCH)
    if named == "off":
        return None
    return Path(named) if named else cache_folder("quantized")
