"""A helper that blocks grammar checks for as long as a test needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from scheduler_service.serving.grammar_checks import GrammarChecks


@contextmanager
def held_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Block the thread that checks grammars once a check has begun.

    Yields two events: the check sets the first when it begins, and continues when the test sets the second.
    """
    begun, go_on = Event(), Event()
    compile_on_thread = GrammarChecks._compile_on_thread

    def compile_held(checks: GrammarChecks, grammar: object) -> tuple[float, str]:
        begun.set()
        assert go_on.wait(30)
        return compile_on_thread(checks, grammar)

    monkeypatch.setattr(GrammarChecks, "_compile_on_thread", compile_held)
    try:
        yield begun, go_on
    finally:
        go_on.set()
