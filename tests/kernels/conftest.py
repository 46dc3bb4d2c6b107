import pytest

from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.cpu.library import load_library
from testing.kernels.compiler import skip_without_compiler
from worker_service.startup.cpu_kernels import environment_build


@pytest.fixture(scope="session")
def cpu_kernels() -> CpuKernels:
    """The C kernels, built for this processor or for `PAGEWIRE_CPU_VARIANT`."""
    skip_without_compiler()
    return CpuKernels(load_library(environment_build()))
