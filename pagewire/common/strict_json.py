"""JSON that every reader takes. Python's own writes Infinity and NaN, which JSON has not, and reads what is nested so
deeply that what goes through it fails."""

import json
import math
from collections.abc import Callable
from typing import Any

from pagewire.common.surrogates import without_half_escapes

MAX_DEPTH = 128  # as deep as the library of grammars reads
# Of what one call of a decoder reads, which keeps the interpreter's lock: it takes 20 ms at most, of a slow processor.
MAX_VALUES = 1 << 19
# What reading costs, in numbers without a fraction.
_TEXT, _CONTAINER, _FRACTION, _EXPONENT = 4, 6, 15, 500
_LONG = 30  # for each run of 20 digits in a number: up to the 4299 of the longest integer the cost is a square
_ZEROS = b"0" * 20
_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(256))
_UNCOUNTED = bytes(set(range(256)) - set(b",:[{.eE"))
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


def count_values(text: bytes) -> int:
    """Return how many values JSON has, each counted by what reading it costs at most: a number 1, a text or key 4, a
    list or object 6, a number with a fraction 15, one with an exponent 500, and 20 digits in a row 30 more.

    Counting takes some milliseconds for 4 MiB, and ends early above MAX_VALUES. What is no JSON has some number.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = text.count(b'"') // 2
    if num_texts * _TEXT > MAX_VALUES:
        return num_texts * _TEXT
    outside = b"".join(text.split(b'"')[::2]) if num_texts else text
    if (num_plain := outside.count(b",")) > MAX_VALUES:
        return num_plain
    num_long = outside.translate(_AS_ZEROS).count(_ZEROS)
    num_letters = outside.count(b"true") + outside.count(b"false")
    outside = outside.translate(None, _UNCOUNTED)
    num_exponents = outside.count(b"e") + outside.count(b"E") - num_letters
    num_containers = outside.count(b"[") + outside.count(b"{")
    num_weighed = _TEXT * num_texts + _CONTAINER * num_containers + _FRACTION * outside.count(b".")
    return num_weighed + _EXPONENT * num_exponents + _LONG * num_long + num_plain


def from_json(text: str) -> Any:
    """Return what JSON of strangers says, with U+FFFD in place of half a surrogate pair. Raises ValueError for what is
    none, for more than MAX_VALUES, and for more than MAX_DEPTH lists and objects within one another."""
    if (number := count_values(text.encode(errors="surrogatepass"))) > MAX_VALUES:
        raise ValueError(f"it has at least {number} values, more than {MAX_VALUES}")
    try:
        read = json.loads(without_half_escapes(text) if "\\ud" in text or "\\uD" in text else text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [read]
    for _ in range(MAX_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for outer in containers for inner in (outer.values() if isinstance(outer, dict) else outer)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(_TOO_DEEP)
    return read
