"""The C kernels as other processors have them."""

import pytest

from pagewire.kernels.cpu import BuildError, CpuKernels
from pagewire.kernels.cpu.library import flags_of, load_library
from tests.compiler import skip_without_compiler


def load_variant(name: str) -> CpuKernels:
    """Skips the test where no compiler can build it, or this processor would not run it."""
    skip_without_compiler()
    try:
        flags_of(name)
    except BuildError as error:
        pytest.skip(str(error))
    return CpuKernels(load_library(name))
