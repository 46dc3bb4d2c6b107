"""Whether there is a C compiler, as a fresh machine may lack it, and what the tests have built by it.

Run as a process of its own, `python -m testing.kernels.compiler`, it builds the CPU's kernels in every variant, beside
tests that would have to wait for them. What is built already is not built again.
"""

import os
import platform

import pytest

from deploy.platform_wheel import variants_of
from pagewire.kernels.cpu.compiler import Compiler, describe_refusals, find_compilers
from pagewire.kernels.cpu.library import build_library, choose_variant, flags_of
from worker_service.startup.cpu_kernels import environment_build


def skip_without_compiler() -> None:
    """Tests that need the C kernels say so and are left out where nothing can build them."""
    first_compiler()


def first_compiler() -> Compiler:
    """The first one that answers. Skips the test where there is none."""
    refusals: dict[str, str] = {}
    found = next(find_compilers(os.environ.get("CC"), refusals), None)
    if found is None:
        pytest.skip(f"there is no C compiler ({describe_refusals(refusals)})")
    return found


def build_variants() -> None:
    """That of this processor first, since workers load it. Raises BuildError."""
    build = environment_build()
    own = choose_variant(build.variant)
    for name in sorted(variants_of(platform.machine()), key=lambda name: name != own):
        build_library(build, flags_of(name))


if __name__ == "__main__":
    build_variants()
