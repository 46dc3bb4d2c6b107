"""Cases of a test that `make test-all` alone runs."""

from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """Return the cases for `parametrize`, marked; a tuple is one of several parameters."""
    rows = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*row, marks=pytest.mark.thorough) for row in rows]
