"""The line that says how far a list of requests has come."""

import io
from typing import Any

from pagewire.llm.progress import ForeignProgress, Progress


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
        progress.add(10)
    clock.seconds += 0.88
    progress.add(30)
    progress.close()
    first, *_, last = file.getvalue().removeprefix("\r").split("\r")
    assert first == "2/3 requests, 0.1 s, 166.7 output tokens/s\x1b[K"
    assert last == "3/3 requests, 1.0 s, 50.0 output tokens/s\x1b[K\n"


def test_a_log_has_a_line_now_and_then() -> None:
    file, clock = io.StringIO(), Clock()
    progress = Progress(100, file, clock)
    for _ in range(100):
        clock.seconds += 0.25
        progress.add(4)
    progress.close()
    lines = file.getvalue().splitlines()
    assert lines == [f"{num}/100 requests, {num / 4:.1f} s, 16.0 output tokens/s" for num in (40, 80)]


def test_what_is_done_soon_says_nothing_in_a_log() -> None:
    file = io.StringIO()
    progress = Progress(1, file)
    progress.add(4)
    progress.close()
    assert file.getvalue() == ""


def test_a_bar_of_somebody_elses() -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options)

        def update(self, num: int) -> None:
            calls.append(num)

        def close(self) -> None:
            calls.append("closed")

    progress = ForeignProgress(2, Bar)
    progress.add(10)
    progress.add(10)
    progress.close()
    assert calls == [{"total": 2, "desc": "requests"}, 1, 1, "closed"]
