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
    """Return a text that can be encoded in UTF-8. Surrogate pairs are joined to one character, and unpaired surrogates
    become U+FFFD.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_half_escapes(text: str) -> str:
    """Return a JSON text in which the escape of each unpaired surrogate, such as \\ud83d, is replaced by \\ufffd."""
    return HalfEscapes().feed(text, is_last=True)


class HalfEscapes:
    r"""A filter for a JSON text that arrives in pieces. The filter replaces the escape of each unpaired surrogate, such
    as \ud83d, by \ufffd. The two escapes of a pair may arrive in different pieces.
    """

    def __init__(self) -> None:
        self._held = ""  # an incomplete escape, or a high surrogate that may be followed by a low one

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Filter the next piece of a JSON text, and return the text that is final now. `is_last` marks the last piece;
        no text may follow it.
        """
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
