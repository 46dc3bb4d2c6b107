"""Memory sizes for people: the largest unit with a value of at least 1, formatted by a single function."""

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


def test_sizes_are_formatted_in_one_place() -> None:
    rounded = re.compile(r"(f\}|%\.\d+f)[ \"f\n]*[KMGT]i?B\b|\bGIB:\.\df")
    found = {path for path in sources(*PACKAGES) if rounded.search((ROOT / path).read_text(encoding="utf-8"))}
    units = re.compile(r"\"[MG]iB\"")
    found |= {path for path in sources(*PACKAGES) if units.search((ROOT / path).read_text(encoding="utf-8"))}
    assert {path.name for path in found} == {"memory_size.py"}
