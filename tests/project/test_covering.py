"""Tests of the marker `one_of_each`, which selects the cases that `make test` runs."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.covering import covering

ROOT = Path(__file__).parents[2]
TESTS = """
    import pytest

    @pytest.fixture(params=["x", "y"])
    def letter(request):
        return request.param

    @pytest.mark.one_of_each
    @pytest.mark.parametrize(("number", "sign"), [(1, "+"), (1, "-"), (2, "+")])
    def test_pairs(letter, number, sign): ...

    @pytest.mark.one_of_each("number")
    @pytest.mark.parametrize("seed,number", [(0, 1), (1, 1), (2, 2)])
    def test_named(seed, number): ...
"""


def test_every_value_occurs_and_no_case_more_than_is_needed() -> None:
    cases = list(itertools.product("abcde", "xyz", "12"))
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == 5
    for column, values in zip(zip(*chosen, strict=True), ("abcde", "xyz", "12"), strict=True):
        assert set(column) == set(values)
    assert max(sum(case[1] == value for case in chosen) for value in "xyz") == 2, "they take turns"
    assert covering([]) == []
    assert covering([("a",), ("a",)]) == [0]


def test_the_marker_leaves_the_other_cases_to_make_test_all(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text("\n".join(line[4:] for line in TESTS.splitlines()))
    options = [
        "--collect-only",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    found = {}
    for selection in ("thorough", "not thorough"):
        command = [sys.executable, "-m", "pytest", *options, "-m", selection, str(tmp_path)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        printed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
        found[selection] = [line.rpartition("::")[2] for line in printed.splitlines() if "::" in line]
    assert found["not thorough"] == [
        "test_pairs[x-1-+]",
        "test_pairs[x-2-+]",
        "test_pairs[y-1--]",
        "test_named[0-1]",
        "test_named[2-2]",
    ]
    assert len(found["thorough"]) == 4
