"""JSON that every reader takes. Python's own writes Infinity and NaN, which JSON has not."""

import json
import math
from collections.abc import Callable
from typing import Any


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
