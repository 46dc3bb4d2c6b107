"""Kernels for CPUs, in C: built at first use with the system's compiler, called through ctypes.

`PAGEWIRE_CPU_KERNELS` says whether: "auto" (the default) uses them where they can be built, and says in one warning why
not; "off" does not; "require" raises instead. `PAGEWIRE_CPU_VARIANT` says what they are built for: "native" (the
default) for all that this processor has, or "portable", "avx2", "avx512" or "avx512_bf16" for that much of it.
"""

import functools
import logging
import os
from collections.abc import Sequence

from pagewire.kernels.cpu.decoder import DecoderKernel, DecoderWeights, LayerWeights
from pagewire.kernels.cpu.library import NATIVE, VARIANTS, BuildError, load_library
from pagewire.kernels.cpu.linear import PackedLinear
from pagewire.kernels.cpu.operations import CpuKernels
from pagewire.kernels.cpu.paged import PagedRows, PagedScoring

__all__ = [
    "BuildError",
    "CpuKernels",
    "DecoderKernel",
    "DecoderWeights",
    "LayerWeights",
    "PackedLinear",
    "PagedRows",
    "PagedScoring",
    "chosen_variant",
    "load_kernels",
]

logger = logging.getLogger(__name__)

SWITCH = "PAGEWIRE_CPU_KERNELS"
_MODES = ("auto", "off", "require")
VARIANT_SWITCH = "PAGEWIRE_CPU_VARIANT"


def load_kernels() -> CpuKernels | None:
    """The kernels, or None where there are none. The first call may take seconds: it builds them.

    Raises:
        ValueError: `PAGEWIRE_CPU_KERNELS` or `PAGEWIRE_CPU_VARIANT` is none of its values.
        BuildError: it is "require" and they cannot be built.
    """
    mode, variant = _choice(SWITCH, _MODES), chosen_variant()
    if mode == "off":
        return None
    kernels = _load(variant)
    if isinstance(kernels, BuildError):
        if mode == "require":
            raise kernels
        return None
    return kernels


def chosen_variant() -> str:
    """What `PAGEWIRE_CPU_VARIANT` says. Raises ValueError if it is none of its values."""
    return _choice(VARIANT_SWITCH, (NATIVE, *VARIANTS))


def _choice(name: str, choices: Sequence[str]) -> str:
    """The first of the choices where the environment does not say."""
    chosen = os.environ.get(name, choices[0])
    if chosen not in choices:
        raise ValueError(f"{name} is {chosen!r}; it must be one of {', '.join(choices)}")
    return chosen


@functools.cache
def _load(variant: str) -> CpuKernels | BuildError:
    """Tries each once in a process."""
    try:
        kernels = CpuKernels(load_library(variant))
    except BuildError as error:
        logger.warning("computing in plain torch, without the CPU kernels: %s", error)
        return error
    logger.info("CPU kernels: %s", kernels.variant)
    return kernels
