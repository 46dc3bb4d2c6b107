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
    """The JSON Schemas of one request have too many values or characters. The error message names the kind and the
    limit.
    """


class SchemaBudget:
    """A budget for the number of values and characters in the JSON Schemas of one request. The budget limits the time
    that the event loop spends on the conversion of schemas to a grammar.
    """

    def __init__(self) -> None:
        self._num_values = MAX_VALUES
        self._num_chars = MAX_CHARS

    def take(self, num_values: int, num_chars: int = 0) -> None:
        """Subtract JSON values and characters from the request's budget for JSON Schemas. Raises SchemaBudgetError if
        less than zero remains.
        """
        self._num_values -= num_values
        self._num_chars -= num_chars
        if self._num_values < 0:
            raise SchemaBudgetError(f"more than {MAX_VALUES} values")
        if self._num_chars < 0:
            raise SchemaBudgetError(f"more than {MAX_CHARS} characters")

    def take_tree(self, value: Any) -> None:
        """Subtract a JSON value and all values nested in it from the request's budget for JSON Schemas. Raises
        SchemaBudgetError if less than zero remains.
        """
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
        """Charge a JSON text to the request's budget for JSON Schemas before the text is parsed. At least one value is
        charged for each value in the text. Raises SchemaBudgetError if the budget is exceeded.
        """
        self.take(1, len(text))
        self.take(sum(map(text.count, _COUNTED)))
