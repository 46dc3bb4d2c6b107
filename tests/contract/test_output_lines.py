"""The lines that the command prints when an output fails, and the error after them."""

import contextlib
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.cli import connection
from pagewire.cli.chat_terminal import ChatTerminal
from pagewire.cli.request import SamplePrinter, attach, stream
from pagewire.client.completion import Output, Usage
from pagewire.client.errors import CommandError, PagewireError
from pagewire.client.sampling_params import SamplingParams


class BrokenOff:
    """A client whose streams fail after some words, or before the first.

    A sample ends with its word if there are several samples, or if the word ends with a period.
    """

    def __init__(self, *words: str, num_samples: int = 1) -> None:
        self._words = words
        self._num_samples = num_samples

    def stream(self, prompt: str | None, sampling: SamplingParams) -> Iterator[Output]:
        for index, word in enumerate(self._words):
            reason = "stop" if self._num_samples > 1 or word.endswith(".") else None
            sample = index % self._num_samples
            yield Output("1", sample, (1,), word, reason, None, None, None, Usage(1, 0, 1) if reason else None, 0, None)
        raise PagewireError("the server has gone")

    def result(self, request_id: str, *, tenant: str) -> Any:
        return SimpleNamespace(outputs=[None] * self._num_samples)

    def attach(self, request_id: str, *, tenant: str, from_token: int) -> Iterator[Output]:
        return self.stream(None, SamplingParams())


@pytest.mark.parametrize(
    ("words", "printed"),
    [((), ""), (("upon",), "upon\n"), (("upon\n",), "upon\n"), (("abc.",), "abc.\n")],
)
def test_an_error_stands_in_a_line_of_its_own(words: tuple[str, ...], printed: str) -> None:
    file, client = io.StringIO(), BrokenOff(*words)
    broken: Any = client
    with pytest.raises(PagewireError, match="the server has gone"):
        stream(broken, "a", SamplingParams(), SamplePrinter(1, file))
    assert file.getvalue() == printed


@pytest.mark.parametrize(
    ("words", "num_samples", "printed"),
    [
        (("half a line",), 1, "half a line\n"),
        (("abc.",), 1, "abc.\n"),
        (("abc",), 2, "--- sample 0 ---\nabc\n--- sample 1 ---\n"),
    ],
)
def test_an_error_of_what_one_attaches_to_does_so_too(
    words: tuple[str, ...],
    num_samples: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = BrokenOff(*words, num_samples=num_samples)
    monkeypatch.setattr(connection, "client", lambda *_: contextlib.nullcontext(client))
    with pytest.raises(PagewireError, match="the server has gone"):
        attach(["1"])
    assert capsys.readouterr().out == printed


def test_an_answer_that_cannot_be_read_is_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(prompt: str) -> str:
        raise OSError(5, "Input/output error")

    terminal = ChatTerminal(None)
    terminal.is_interactive = True
    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(CommandError, match="cannot read standard input: Input/output error"):
        terminal.confirms("Go on?")
