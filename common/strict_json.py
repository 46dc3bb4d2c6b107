"""JSON that every reader takes. Python's own writes Infinity and NaN, which JSON has not, and reads what is nested so
deeply that what goes through it fails."""

import json
import math
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 128  # as deep as the library of grammars reads
_TOO_DEEP = f"it has more than {MAX_DEPTH} lists and objects within one another"


class StrictEncoder(json.JSONEncoder):
    """Writes something else in place of numbers that are infinite, or none."""

    def __init__(self, stand_in: Callable[[float], Any] = lambda number: None, **options: Any) -> None:
        """`stand_in`: what is written for such a number; null, if left out. `options`: as of the class beneath."""
        super().__init__(allow_nan=False, **options)
        self._stand_in = stand_in

    def encode(self, o: Any) -> str:
        """Return the JSON of a value."""
        try:
            return super().encode(o)
        except ValueError:  # such numbers are rare, and looking for them takes long
            return super().encode(self._finite(json.loads(json.dumps(o, default=self.default))))

    def _finite(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return self._stand_in(value)
        if isinstance(value, dict):
            return {name: self._finite(item) for name, item in value.items()}
        return [self._finite(item) for item in value] if isinstance(value, list) else value


to_json = StrictEncoder().encode


def from_json(text: str) -> Any:
    """Return what JSON of strangers says. Raises ValueError for what is none, and for more than MAX_DEPTH lists and
    objects within one another."""
    try:
        read = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [read]
    for _ in range(MAX_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for outer in containers for inner in (outer.values() if isinstance(outer, dict) else outer)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(_TOO_DEEP)
    return read
