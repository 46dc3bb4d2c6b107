"""Sizes for people: in a unit of which there is one at least, by one function alone."""

import re

import pytest

from pagewire.common.process.memory_size import describe_memory
from testing.sources import PACKAGES, ROOT, sources


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (-5, "0 bytes"), (0, "0 bytes"), (0.5, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"),
        (1536 << 10, "1.50 MiB"), ((1 << 30) - 1, "1024.00 MiB"), (1 << 30, "1.00 GiB"), (999 << 30, "999.00 GiB"),
        (5 << 42, "20.00 TiB"),
    ],
)  # fmt: skip
def test_a_size_has_the_unit_that_suits_it(num_bytes: float, said: str) -> None:
    assert describe_memory(num_bytes) == said


def test_no_other_place_rounds_a_size() -> None:
    rounded = re.compile(r"(f\}|%\.\d+f)[ \"f\n]*[KMGT]i?B\b|\bGIB:\.\df")
    found = {path for path in sources(*PACKAGES) if rounded.search((ROOT / path).read_text(encoding="utf-8"))}
    units = re.compile(r"\"[MG]iB\"")
    found |= {path for path in sources(*PACKAGES) if units.search((ROOT / path).read_text(encoding="utf-8"))}
    assert {path.name for path in found} == {"memory_size.py"}
