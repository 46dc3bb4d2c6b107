"""The C kernels in the variants of other processors."""

from dataclasses import replace

import pytest

from pagewire.kernels.cpu import BuildError, CpuKernels
from pagewire.kernels.cpu.library import choose_variant, load_library
from testing.kernels.compiler import skip_without_compiler
from worker_service.startup.cpu_kernels import environment_build


def load_variant(name: str) -> CpuKernels:
    """Load a variant. Skip the test if no compiler can build the variant or this processor cannot run it."""
    skip_without_compiler()
    try:
        choose_variant(name)
    except BuildError as error:
        pytest.skip(str(error))
    return CpuKernels(load_library(replace(environment_build(), variant=name)))
