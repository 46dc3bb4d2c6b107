"""What the command prints of an output that breaks off, beside the error that follows it."""

import io
from collections.abc import Iterator
from typing import Any

import pytest

from pagewire.cli.chat_terminal import ChatTerminal
from pagewire.cli.request import SamplePrinter, stream
from pagewire.completion import Output
from pagewire.errors import CommandError, PagewireError
from pagewire.sampling import SamplingParams


class BrokenOff:
    """A client whose streams fail after a word, or before it."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def stream(self, prompt: str | None, sampling: SamplingParams) -> Iterator[Output]:
        for word in self._words:
            yield Output("1", 0, (1,), word, None, None, None, None, None, 0, None)
        raise PagewireError("the server has gone")


@pytest.mark.parametrize(
    ("before", "words", "printed"),
    [("", (), ""), ("Once", (), "Once\n"), ("", ("upon",), "upon\n"), ("Once", (" upon\n",), "Once upon\n")],
)
def test_an_error_stands_in_a_line_of_its_own(before: str, words: tuple[str, ...], printed: str) -> None:
    file, client = io.StringIO(), BrokenOff(*words)
    broken: Any = client
    with pytest.raises(PagewireError, match="the server has gone"):
        stream(broken, before, SamplingParams(), SamplePrinter(1, file, before))
    assert file.getvalue() == printed


def test_an_answer_that_cannot_be_read_is_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(prompt: str) -> str:
        raise OSError(5, "Input/output error")

    terminal = ChatTerminal(None)
    terminal.is_interactive = True
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(CommandError, match="cannot read standard input: Input/output error"):
        terminal.confirms("Go on?")
