"""The choice of CPU kernels by environment variables. Only this module of a worker reads these variables.

- `PAGEWIRE_CPU_KERNELS` turns the kernels on or off. "auto" (the default) uses them if they can be built, and otherwise
  logs one warning with the reason. "off" does not use them. "require" raises an error if they cannot be built.
- `PAGEWIRE_CPU_VARIANT` selects the variant: "portable", "avx2", "avx512", "avx512_bf16", "amx_int8" or, on AArch64,
  "dotprod".
  "native" (the default) selects the widest variant that this processor supports.
- `CC` names the compiler.
- `PAGEWIRE_CACHE` names the folder for built kernels and for weights quantised for them, by default in the user's
  cache.
- `PAGEWIRE_QUANTIZED_CACHE` names another folder for the quantised weights; "off" keeps no quantised weights.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pagewire.kernels.cpu import NATIVE, VARIANTS, Build, BuildError, CpuKernels, load_kernels
from worker_service.startup.resources import available_bytes, num_usable_cpus

_SWITCH = "PAGEWIRE_CPU_KERNELS"
_MODES = ("auto", "off", "require")
_VARIANT_SWITCH = "PAGEWIRE_CPU_VARIANT"
_COMPILER_BYTES = 256 << 20  # memory reserved for each compiler process
_QUANTIZED_SWITCH = "PAGEWIRE_QUANTIZED_CACHE"


def load_cpu_kernels(tell: Callable[[str], object] = lambda doing: None) -> CpuKernels | None:
    """Build or load the C kernels for this CPU. Return None if they are turned off or cannot be built.

    The first call may take seconds, because it builds the kernels; `tell` receives the progress. Raises ValueError if
    `PAGEWIRE_CPU_KERNELS` or `PAGEWIRE_CPU_VARIANT` has an unknown value, or if the kernels are required and cannot be
    built.
    """
    mode, build = _choice(_SWITCH, _MODES), environment_build(tell)
    kernels = None if mode == "off" else load_kernels(build)
    if not isinstance(kernels, BuildError):
        return kernels
    if mode == "require":
        raise ValueError(f"{_SWITCH} is require: {kernels}") from kernels
    return None


def environment_build(tell: Callable[[str], object] = lambda doing: None) -> Build:
    """Return the build settings for the C kernels from environment variables such as `CC`.

    `tell` receives the progress of the build. Raises ValueError if `PAGEWIRE_CPU_VARIANT` has an unknown value.
    """
    num_jobs = max(1, min(num_usable_cpus(), available_bytes() // _COMPILER_BYTES))
    return Build(
        _choice(_VARIANT_SWITCH, (NATIVE, *VARIANTS)), os.environ.get("CC"), cache_folder("kernels"), num_jobs, tell
    )


def _choice(name: str, choices: Sequence[str]) -> str:
    """Return the value of the environment variable `name`, or the first of `choices` if the variable is not set.

    Raises ValueError if the value is not one of `choices`.
    """
    chosen = os.environ.get(name, choices[0])
    if chosen not in choices:
        raise ValueError(f"{name} is {chosen!r}; it must be one of {', '.join(choices)}")
    return chosen


def cache_folder(name: str) -> Path | None:
    """Return the folder $PAGEWIRE_CACHE/NAME, by default pagewire/NAME in the user's cache folder.

    Return None if the variable is not set and the user has no home directory.
    """
    root = os.environ.get("PAGEWIRE_CACHE")
    if root:
        return Path(root) / name
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire" / name
    except RuntimeError:
        return None


def quantized_folder() -> Path | None:
    """Return the folder in which a CPU worker keeps quantised weights for its next start, or None to keep none."""
    named = os.environ.get(_QUANTIZED_SWITCH)
    if named == "off":
        return None
    return Path(named) if named else cache_folder("quantized")
