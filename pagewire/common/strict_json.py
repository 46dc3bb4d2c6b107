"""JSON that every parser accepts, and bounded parsing of JSON from strangers.

Python's encoder writes Infinity and NaN, which are no JSON. Its decoder accepts such deep nesting that code which
traverses the result fails.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from pagewire.common.surrogates import without_half_escapes

MAX_DEPTH = 128  # the deepest nesting that the library of grammars reads
# The most values in one call of a decoder, which holds the GIL: at most 20 ms on a slow processor.
MAX_VALUES = 1 << 19
# The costs of parsing, in units of one number without a fraction.
_TEXT, _CONTAINER, _FRACTION, _EXPONENT = 4, 6, 15, 500
_LONG = 30  # per run of 20 digits; the cost is quadratic up to the longest integer of 4299 digits
_ZEROS = b"0" * 20
_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(256))
_UNCOUNTED = bytes(set(range(256)) - set(b",:[{.eE"))
_TOO_DEEP = f"its lists and objects are nested more than {MAX_DEPTH} levels deep"


class StrictEncoder(json.JSONEncoder):
    """A JSON encoder that writes a substitute for infinite numbers and NaN, because JSON has no such numbers."""

    def __init__(self, substitute: Callable[[float], Any] = lambda number: None, **options: Any) -> None:
        """Create a JSON encoder. `substitute` returns the value to write for an infinite number or NaN, by default
        null. `options` are the options of `json.JSONEncoder`.
        """
        super().__init__(allow_nan=False, **options)
        self._stand_in = substitute

    def encode(self, o: Any) -> str:
        """Return the JSON of a value, with a substitute for each infinite number or NaN."""
        try:
            return super().encode(o)
        except ValueError:  # such numbers are rare, and looking for them is slow
            return super().encode(self._finite(json.loads(json.dumps(o, default=self.default))))

    def _finite(self, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return self._stand_in(value)
        if isinstance(value, dict):
            return {name: self._finite(item) for name, item in value.items()}
        return [self._finite(item) for item in value] if isinstance(value, list) else value


to_json = StrictEncoder().encode


def count_values(text: bytes) -> int:
    """Estimate the cost of parsing a JSON text before it is parsed. Return the number of values in the text, weighted
    with an upper bound of their cost.

    The weights are: 1 for a number, 4 for a text or key, 6 for a list or object. A number with a fraction has the
    weight 15, and with an exponent 500. Each run of 20 digits adds 30. Counting takes some milliseconds for 4 MiB, and
    stops early above MAX_VALUES. For a text that is no JSON, the result is arbitrary.
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
    """Parse JSON from an untrusted source, within limits on work and nesting. Unpaired surrogates become U+FFFD.

    Raises ValueError for invalid JSON, for more than MAX_VALUES weighted values (see `count_values`), and for lists and
    objects nested deeper than MAX_DEPTH.
    """
    if (number := count_values(text.encode(errors="surrogatepass"))) > MAX_VALUES:
        raise ValueError(f"it has at least {number} values, but at most {MAX_VALUES} are allowed")
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
