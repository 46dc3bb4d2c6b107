"""The histories in `histories/`: the core's plans and events must equal the recorded lines."""

import pytest

from tests.core.story import HISTORIES, retold


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.txt")), ids=lambda path: path.stem)
def test_the_core_does_what_is_told(path):
    text = path.read_text()
    assert retold(text) == text, "if it is better so: python -m tests.core.story --rewrite, and read the difference"
