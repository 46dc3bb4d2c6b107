"""Replacement of unpaired surrogates, which Python texts and JSON escapes can contain but UTF-8 cannot.

A model may write such an escape, and clients send them when they split a text inside a pair. Each one becomes U+FFFD,
as in JSON encoders.
"""

import re

# Text without an unpaired surrogate: other characters, other escapes, and pairs. An incomplete escape does not match.
_WHOLE = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?=[^dD]|[dD][0-7])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+", re.DOTALL
)
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_HALF_CHARS, _PAIR_CHARS = 6, 12
_FIRST_LOW = "dc"  # of low surrogates, which come second in a pair
_REPLACEMENT = r"\ufffd"


def without_halves(text: str) -> str:
    """Return a text in which surrogate pairs are joined to one character, and unpaired surrogates are U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_half_escapes(text: str) -> str:
    """Return a JSON text with \\ufffd in place of each escape of an unpaired surrogate."""
    return HalfEscapes().feed(text, is_last=True)


class HalfEscapes:
    r"""A filter for JSON in pieces that writes \ufffd in place of each escape of an unpaired surrogate."""

    def __init__(self) -> None:
        self._held = ""  # an incomplete escape, or a high surrogate that may be followed by a low one

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Filter the next piece and return the text that is final now. No text may follow a call with `is_last`."""
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
