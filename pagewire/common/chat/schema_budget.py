"""A bound on the work that the JSON Schemas of one call cost before they are a grammar.

A grammar is first read in a process with limits of its own (`pagewire.common.grammars.trial`). The code that makes its
text of the schemas runs on the event loop, so it charges each value that it visits or copies to a budget first.
"""

from typing import Any

from pagewire.common.wire.sampling_rules import MAX_GRAMMAR_BYTES

MAX_VALUES = 1 << 14
MAX_CHARS = MAX_GRAMMAR_BYTES
# Each begins a value, or one more of a list or an object, or costs its reader a step.
_COUNTED = "[{,\\"


class SchemaBudgetError(ValueError):
    """More values or characters than a call's schemas may have. The text says which, and the limit."""


class SchemaBudget:
    """The values and characters that are left for the schemas of one call."""

    def __init__(self) -> None:
        self._num_values = MAX_VALUES
        self._num_chars = MAX_CHARS

    def take(self, num_values: int, num_chars: int = 0) -> None:
        """Charge values and characters. Raises SchemaBudgetError."""
        self._num_values -= num_values
        self._num_chars -= num_chars
        if self._num_values < 0:
            raise SchemaBudgetError(f"more than {MAX_VALUES} values")
        if self._num_chars < 0:
            raise SchemaBudgetError(f"more than {MAX_CHARS} characters")

    def take_tree(self, value: Any) -> None:
        """Charge a value of JSON and all values in it. Raises SchemaBudgetError."""
        waiting = [value]
        self.take(1)
        for item in waiting:
            if isinstance(item, str):
                self.take(0, len(item))
            elif isinstance(item, dict | list):
                self.take(len(item))  # before anything is made of them
                waiting += item
                waiting += item.values() if isinstance(item, dict) else ()

    def take_json(self, text: str) -> None:
        """Charge a text of JSON before it is read: at least one value for each that it holds. Raises
        SchemaBudgetError."""
        self.take(1, len(text))
        self.take(sum(map(text.count, _COUNTED)))
