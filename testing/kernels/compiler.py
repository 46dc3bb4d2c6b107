"""The C compiler that tests use, and the C kernels that they build with it. A machine may lack a compiler.

`python -m testing.kernels.compiler` builds the CPU kernels in every variant that is not built yet. It can run beside
tests that would otherwise wait for these builds.
"""

import os
import platform

import pytest

from deploy.platform_wheel import variants_of
from pagewire.kernels.cpu.compiler import Compiler, describe_refusals, find_compilers
from pagewire.kernels.cpu.library import build_library, choose_variant, flags_of
from worker_service.startup.cpu_kernels import environment_build


def skip_without_compiler() -> None:
    """Skip the test if no C compiler is available to build the C kernels."""
    first_compiler()


def first_compiler() -> Compiler:
    """Return the first compiler that works. Skip the test if no C compiler is available."""
    refusals: dict[str, str] = {}
    found = next(find_compilers(os.environ.get("CC"), refusals), None)
    if found is None:
        pytest.skip(f"there is no C compiler ({describe_refusals(refusals)})")
    return found


def build_variants() -> None:
    """Build the CPU kernels of all variants. The variant of this processor comes first, because workers load it.

    Raises BuildError if a build fails.
    """
    build = environment_build()
    own = choose_variant(build.variant)
    for name in sorted(variants_of(platform.machine()), key=lambda name: name != own):
        build_library(build, flags_of(name))


if __name__ == "__main__":
    build_variants()
