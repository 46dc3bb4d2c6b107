"""Halves of surrogate pairs, which texts of Python and escapes of JSON can have alone, and UTF-8 cannot.

A model may write such an escape, and clients send them where they have cut a text in two. Each becomes U+FFFD, as
encoders of JSON write it.
"""

import re

# Text without a lone half: other characters, other escapes, and pairs. What is not yet whole is left.
_WHOLE = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?=[^dD]|[dD][0-7])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+", re.DOTALL
)
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_HALF_CHARS, _PAIR_CHARS = 6, 12
_FIRST_LOW = "dc"  # of the second halves
_REPLACEMENT = r"\ufffd"


def without_halves(text: str) -> str:
    """Return a text in which halves that belong together are one character, and others U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_half_escapes(text: str) -> str:
    """Return JSON with U+FFFD in place of each escape of a half that stands alone."""
    return HalfEscapes().feed(text, is_last=True)


class HalfEscapes:
    r"""Writes \ufffd in place of each escape of a half that stands alone, in JSON that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""  # the beginning of an escape, or a first half of which the second may come

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Return what is known of the text so far. Nothing can follow what is last."""
        text, pieces, at = self._held + text, [], 0
        while True:
            whole = _WHOLE.match(text, at)
            assert whole is not None, "it matches nothing too"
            at = whole.end()
            pieces.append(whole[0])
            rest = text[at : at + _PAIR_CHARS]
            half = _HALF.match(rest)
            may_be_first = half and rest[2:4].lower() < _FIRST_LOW and r"\u".startswith(rest[6:8])
            if not rest or (len(rest) < (_PAIR_CHARS if may_be_first else _HALF_CHARS) and not is_last):
                self._held = text[at:]
                return "".join(pieces)
            pieces.append(_REPLACEMENT if half else rest[:2])
            at += _HALF_CHARS if half else 2
