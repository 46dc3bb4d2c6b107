"""CPU kernels in C, compiled on first use with the system's compiler and called through cffi."""

import functools
import logging

from pagewire.kernels.cpu.compiler import BuildError
from pagewire.kernels.cpu.decoder_kernel import (
    DecoderKernel,
)
from pagewire.kernels.cpu.kernel_calls import CpuKernels
from pagewire.kernels.cpu.library import NATIVE, VARIANTS, Build, load_library
from pagewire.kernels.cpu.linear import PackedExperts, PackedLinear, PanelFormat
from pagewire.kernels.cpu.paged import MAX_HEAD_DIM, FlatRows, PagedRows, TableFlattener

__all__ = [
    "MAX_HEAD_DIM",
    "NATIVE",
    "VARIANTS",
    "Build",
    "BuildError",
    "CpuKernels",
    "DecoderKernel",
    "FlatRows",
    "PackedExperts",
    "PackedLinear",
    "PagedRows",
    "PanelFormat",
    "TableFlattener",
    "load_kernels",
]

logger = logging.getLogger(__name__)


@functools.cache
def load_kernels(build: Build) -> CpuKernels | BuildError:
    """Load the CPU kernels that `build` describes, and compile them if necessary. If that fails, log a warning and
    return the error, so that the caller can compute in plain torch.

    The result is cached, so each build is tried once per process. The first call may take seconds, because it compiles
    the kernels.
    """
    try:
        kernels = CpuKernels(load_library(build))
    except BuildError as error:
        logger.warning("computing in plain torch, without the CPU kernels: %s", error)
        return error
    logger.info("CPU kernels: %s", kernels.variant)
    return kernels
