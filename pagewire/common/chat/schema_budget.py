"""A bound on the work to convert the JSON Schemas of one request to a grammar.

A separate process with limits of its own parses a grammar first (`pagewire.common.grammars.trial`). The code that
builds the grammar's text from the schemas runs on the event loop. It therefore charges each value that it visits or
copies to a budget first.
"""

from typing import Any

from pagewire.common.wire.sampling_rules import MAX_GRAMMAR_BYTES

MAX_VALUES = 1 << 14
MAX_CHARS = MAX_GRAMMAR_BYTES
# Each of these characters begins a value, separates two values, or costs the JSON parser a step.
_COUNTED = "[{,\\"


class SchemaBudgetError(ValueError):
    """The schemas of a request have too many values or characters. The message names the kind and the limit."""


class SchemaBudget:
    """The remaining number of values and characters for the schemas of one request."""

    def __init__(self) -> None:
        self._num_values = MAX_VALUES
        self._num_chars = MAX_CHARS

    def take(self, num_values: int, num_chars: int = 0) -> None:
        """Charge values and characters. Raises SchemaBudgetError if the budget is exceeded."""
        self._num_values -= num_values
        self._num_chars -= num_chars
        if self._num_values < 0:
            raise SchemaBudgetError(f"more than {MAX_VALUES} values")
        if self._num_chars < 0:
            raise SchemaBudgetError(f"more than {MAX_CHARS} characters")

    def take_tree(self, value: Any) -> None:
        """Charge a JSON value and all values nested in it. Raises SchemaBudgetError if the budget is exceeded."""
        waiting = [value]
        self.take(1)
        for item in waiting:
            if isinstance(item, str):
                self.take(0, len(item))
            elif isinstance(item, dict | list):
                self.take(len(item))  # before the code below copies the items
                waiting += item
                waiting += item.values() if isinstance(item, dict) else ()

    def take_json(self, text: str) -> None:
        """Charge a JSON text before it is parsed: at least one value for each value that it contains. Raises
        SchemaBudgetError."""
        self.take(1, len(text))
        self.take(sum(map(text.count, _COUNTED)))
