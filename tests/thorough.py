"""Test cases that only `make test-all` runs."""

from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """Return the cases for `parametrize`, marked as `thorough`. A tuple holds the values of several parameters."""
    rows = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*row, marks=pytest.mark.thorough) for row in rows]
