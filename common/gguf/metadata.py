"""Values of a file's metadata, each checked when it is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.common.gguf.file import GgufError, GgufFile, shown


@dataclass(frozen=True, slots=True)
class Metadata:
    """Looks keys up. Each method raises GgufError, which names file and key, for a value of another kind."""

    file: GgufFile
    prefix: str  # of every key that is asked for

    def error(self, key: str, expected: str) -> GgufError:
        """Return the error for a value that is missing or is not as expected."""
        name = self.prefix + key
        value = self.file.metadata.get(name)
        if value is None:
            return GgufError(f"{self.file.path} has no {name}, which must be {expected}")
        return GgufError(f"{self.file.path}: {name} is {shown(value)}, but must be {expected}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise self.error(key, "a whole number from 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.error(key, "an array of texts")
        return value

    def numbers(self, key: str, length: int | None = None) -> Sequence[float] | None:
        """Return an array of numbers, one for each of so many or as many as there are, or None if there is none."""
        value = self._value(key, None)
        if value is None:
            return None
        if isinstance(value, str | list) or not hasattr(value, "typecode") or length not in (None, len(value)):
            raise self.error(key, f"an array of {'' if length is None else f'{length} '}numbers")
        return value

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def _value(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(self.prefix + key, default)
