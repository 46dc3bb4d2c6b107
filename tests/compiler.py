"""Whether there is a C compiler, as a fresh machine may lack it, and what the tests have built by it.

Run as a process of its own, `python -m tests.compiler`, it builds the CPU's kernels in every variant, beside tests that
would have to wait for them. What is built already is not built again.
"""

import os
import platform

import pytest

from deploy.platform_wheel import variants_of
from pagewire.kernels.cpu.library import BuildError, build_library, choose_variant, find_compiler, flags_of
from worker_service.startup.cpu_kernels import environment_build


def skip_without_compiler() -> None:
    """Tests that need the C kernels say so and are left out where nothing can build them."""
    try:
        find_compiler(os.environ.get("CC"))
    except BuildError as error:
        pytest.skip(str(error))


def build_variants() -> None:
    """That of this processor first, since workers load it. Raises BuildError."""
    build = environment_build()
    own = choose_variant(build.variant)
    for name in sorted(variants_of(platform.machine()), key=lambda name: name != own):
        build_library(build, flags_of(name))


if __name__ == "__main__":
    build_variants()
