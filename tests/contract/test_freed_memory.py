"""The memory of large messages and long texts is returned to the system. Separate processes measure it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from testing.scheduler_stack import make_tokenizer

RESIDENT = """
def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
"""
# The first block is freed before the second is allocated. From then on, glibc alone would keep blocks of this size.
LARGE_BLOCKS = """
from pagewire.hosting import freed_memory
freed_memory.give_back_large()
before = resident_mb()
for _ in range(3):
    block = b"x" * 20_000_000
    del block
print(resident_mb() - before)
"""
LONG_TEXTS = """
import asyncio, random, sys
from pathlib import Path
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer

async def encode():
    rng = random.Random(0)
    text = "".join(rng.choices("abcdefghijklm nopqrstuvwxyz", k=1 << 20))
    tokenizer = Tokenizer(Path(sys.argv[1]))
    await tokenizer.encode("once", 10, list, is_long=True)
    before = resident_mb()
    for _ in range(6):
        assert await tokenizer.encode(text, 10, list, is_long=True) > 10
    print(resident_mb() - before)

asyncio.run(encode())
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this allocator is not glibc's")


def kept_mb(program: str, *arguments: str) -> float:
    ended = subprocess.run(
        [sys.executable, "-c", RESIDENT + program, *arguments], capture_output=True, text=True, check=True
    )
    return float(ended.stdout)


@needs_glibc
def test_large_blocks_are_given_back() -> None:
    assert kept_mb(LARGE_BLOCKS) < 5
    assert kept_mb(LARGE_BLOCKS.replace("freed_memory.give_back_large()", "")) > 15, "nothing needs to be done here"


@needs_glibc
def test_long_texts_leave_little(tmp_path: Path) -> None:
    """Tokenizing long texts leaves little memory allocated: only the tokenizer's cache of words remains."""
    make_tokenizer(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    without = "from scheduler_service.serving.checkpoint import tokenizer\ntokenizer._malloc_trim = None\n"
    assert kept_mb(LONG_TEXTS, path) < kept_mb(without + LONG_TEXTS, path) - 50
