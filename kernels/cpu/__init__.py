"""Kernels for CPUs, in C: built at first use with the system's compiler, called through ctypes.

`PAGEWIRE_CPU_KERNELS` says whether: "auto" (the default) uses them where they can be built, and says in one warning why
not; "off" does not; "require" raises instead.
"""

import functools
import logging
import os

from pagewire.kernels.cpu.decoder import DecoderKernel, DecoderWeights, LayerWeights
from pagewire.kernels.cpu.library import BuildError, load_library
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
    "load_kernels",
]

logger = logging.getLogger(__name__)

SWITCH = "PAGEWIRE_CPU_KERNELS"
_MODES = ("auto", "off", "require")


def load_kernels() -> CpuKernels | None:
    """The kernels, or None where there are none. The first call may take seconds: it builds them.

    Raises:
        ValueError: `PAGEWIRE_CPU_KERNELS` is none of its values.
        BuildError: it is "require" and they cannot be built.
    """
    mode = os.environ.get(SWITCH, "auto")
    if mode not in _MODES:
        raise ValueError(f"{SWITCH} is {mode!r}; it must be one of {', '.join(_MODES)}")
    if mode == "off":
        return None
    kernels = _load()
    if isinstance(kernels, BuildError):
        if mode == "require":
            raise kernels
        return None
    return kernels


@functools.cache
def _load() -> CpuKernels | BuildError:
    """Tries once in a process."""
    try:
        kernels = CpuKernels(load_library())
    except BuildError as error:
        logger.warning("computing in plain torch, without the CPU kernels: %s", error)
        return error
    logger.info("CPU kernels: %s", kernels.variant)
    return kernels
