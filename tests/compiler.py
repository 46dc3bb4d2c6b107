"""Whether there is a C compiler, as a fresh machine may lack it."""

import os

import pytest

from pagewire.kernels.cpu.library import BuildError, find_compiler


def skip_without_compiler() -> None:
    """Tests that need the C kernels say so and are left out where nothing can build them."""
    try:
        find_compiler(os.environ.get("CC"))
    except BuildError as error:
        pytest.skip(str(error))
