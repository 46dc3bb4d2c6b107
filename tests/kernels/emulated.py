"""Run tests of the C kernels with kernels for AArch64, which qemu runs.

The first command runs the tests of a model's computation. Arguments after the options are passed to pytest.

    python -m tests.kernels.emulated
    python -m tests.kernels.emulated --processor cortex-a53 tests/kernels/test_cpu_products.py -k bfloat16
"""

import argparse
import platform
import sys

import pytest

import pagewire.kernels.cpu
import testing.kernels.variants
import tests.kernels.conftest
from pagewire.kernels.cpu import library
from testing.kernels.emulated import aarch64

TESTS = (
    "tests/kernels/test_cpu_products.py",
    "tests/kernels/test_cpu_experts.py",
    "tests/kernels/test_cpu_kernels.py::test_every_variant_that_runs_here_equals_reference",
    "tests/kernels/test_cpu_kernels.py::test_every_float8_is_widened_exactly",
    "tests/kernels/test_cpu_kernels.py::test_portable_conversions_are_those_of_torch",
    "tests/kernels/test_cpu_decoder.py",
    "tests/kernels/test_cpu_states.py::test_convolutions_equal_the_reference",
    "tests/kernels/test_cpu_states.py::test_delta_rules_equal_the_reference",
    "tests/kernels/test_cpu_attention_bits.py::test_a_last_query_alone_beside_many_and_in_its_prompt",
    "tests/kernels/test_cpu_aarch64.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=f"By default: {' '.join(TESTS)}"
    )
    parser.add_argument(
        "--processor", choices=aarch64.PROCESSORS, default="neoverse-n1", help="that is emulated (%(default)s)"
    )
    arguments, rest = parser.parse_known_args()
    missing = aarch64.missing_tools()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    pretend(arguments.processor)
    return int(pytest.main(rest or ["-q", *TESTS]))


def pretend(processor: str) -> None:
    """Make all code of this process load kernels of an emulated processor."""

    def load_library(build: library.Build) -> library.Library:
        return aarch64.open_emulated(library.choose_variant(build.variant), processor)

    library._features = lambda: aarch64.PROCESSORS[processor]
    for module in (library, pagewire.kernels.cpu, tests.kernels.conftest, testing.kernels.variants):
        vars(module)["load_library"] = load_library
    platform.machine = lambda: aarch64.MACHINE
    print(f"kernels for AArch64, as {processor} runs them")


if __name__ == "__main__":
    sys.exit(main())
