"""The progress line of a list of requests."""

import io
from functools import partial
from typing import Any

from tqdm import tqdm

from pagewire.progress import ForeignProgress, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_terminal_has_one_line_that_changes() -> None:
    file, clock = Terminal(), Clock()
    progress = Progress(3, file, clock)
    for _ in range(2):
        clock.seconds += 0.06
        progress.add(10, has_ended=True)
    clock.seconds += 0.38
    progress.add(20, has_ended=False)
    clock.seconds += 0.5
    progress.add(10, has_ended=True)
    progress.close()
    first, second, *_, last = file.getvalue().removeprefix("\r").split("\r")
    assert first == "2/3 requests, 20 output tokens, 0.1 s, 166.7 tokens/s\x1b[K"
    assert second == "2/3 requests, 40 output tokens, 0.5 s, 80.0 tokens/s\x1b[K"
    assert last == "3/3 requests, 50 output tokens, 1.0 s, 50.0 tokens/s\x1b[K\n"


def test_a_log_has_a_line_now_and_then() -> None:
    file, clock = io.StringIO(), Clock()
    progress = Progress(100, file, clock, title="load")
    for _ in range(100):
        clock.seconds += 0.25
        progress.add(4, has_ended=True)
    progress.close()
    lines = file.getvalue().splitlines()
    assert lines == [f"load: {n}/100 requests, {4 * n} output tokens, {n / 4:.1f} s, 16.0 tokens/s" for n in (40, 80)]


def test_short_runs_write_no_progress_to_a_log() -> None:
    file = io.StringIO()
    progress = Progress(1, file)
    progress.add(4, has_ended=True)
    progress.close()
    assert file.getvalue() == ""


def test_a_bar_of_another_program() -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options)

        def update(self, num: int) -> None:
            calls.append(num)

        def close(self) -> None:
            calls.append("closed")

    progress = ForeignProgress(2, Bar)
    progress.add(10, has_ended=True)
    progress.add(3, has_ended=False)
    progress.add(7, has_ended=True)
    progress.close()
    assert calls == [{"total": 2, "desc": "requests"}, 1, 1, "closed"]


def test_a_bar_that_can_show_more_shows_tokens_as_they_come() -> None:
    file, clock = io.StringIO(), Clock()
    progress = ForeignProgress(2, partial(tqdm, file=file, mininterval=0, ncols=100), clock)
    shown = []
    for num_tokens, has_ended in [(1, False), (9, False), (10, True), (20, True)]:
        clock.seconds += 0.5
        progress.add(num_tokens, has_ended)
        shown.append(file.getvalue().split("\r")[-1])
    progress.close()
    assert ["0/2" in line for line in shown] == [True, True, False, False]
    rates = ("1 output tokens, 2.0 tokens/s", "10 output tokens, 10.0 tokens/s", "20 output tokens, 13.3 tokens/s")
    assert all(rate in line for rate, line in zip((*rates, "40 output tokens, 20.0 tokens/s"), shown, strict=True))
