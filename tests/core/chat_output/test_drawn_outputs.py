"""Hundreds of random outputs of every format. `make chat-outputs` reads thousands, split at every position."""

import random

import pytest

from testing.chat_output.spellings import SPELLINGS
from tests.core.chat_output.campaign import check

pytestmark = pytest.mark.thorough

NUM_OUTPUTS = 100


@pytest.mark.parametrize("name", SPELLINGS)
def test_parsed_parts_equal_written_parts_for_any_split(name: str) -> None:
    first = random.randrange(1 << 32)
    print(f"first seed {first}")
    for seed in range(first, first + NUM_OUTPUTS):
        check(name, seed, every_split=False)
