import pytest

from kernels.cpu import BuildError, CpuKernels
from kernels.cpu.library import find_compiler, load_library


@pytest.fixture(scope="session")
def cpu_kernels() -> CpuKernels:
    """The C kernels, built for this processor."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return CpuKernels(load_library())
