"""Repeated log lines are logged once a minute."""

import itertools

from pagewire.common.process.log_repetition import Repetition

NOW = [0.0]


def test_words_that_take_turns_are_each_told_once_a_minute() -> None:
    repetition = Repetition(lambda: NOW[0])
    told = []
    for NOW[0], text in zip(range(120), itertools.cycle(["port 1 refused", "late", "port 2 refused"])):
        if repetition.should_log(text):
            told.append((NOW[0], text))
    assert told == [(0, "port 1 refused"), (1, "late"), (60, "port 1 refused"), (61, "late")]
    repetition.forget()
    assert repetition.should_log("late")


def test_remembered_lines_are_limited() -> None:
    repetition = Repetition(lambda: 0.0)
    assert sum(repetition.should_log("x" * length) for length in range(10_000)) == 50
