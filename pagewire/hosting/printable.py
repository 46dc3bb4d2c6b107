"""Escaping of untrusted text for logs and terminals: one line, without terminal control codes."""

import re

# The rest of a longer text is dropped.
MAX_CHARS = 8192
_PLAIN = re.compile("[^ -~]")


def printable(text: str) -> str:
    """Escape untrusted text for logs and terminals. Each non-printable character is replaced by its Python escape, and
    the text is truncated to MAX_CHARS characters.

    Non-printable characters are line ends, control characters, marks that change the writing direction, and surrogates.
    """
    text = shortened(text)
    return text if text.isprintable() else _PLAIN.sub(_escaped, text)


def shortened(text: str) -> str:
    """Truncate a text to MAX_CHARS characters. A truncated text ends with a note that states the number of dropped
    characters."""
    num_left_out = len(text) - MAX_CHARS
    return text if num_left_out <= 0 else f"{text[:MAX_CHARS]} [{num_left_out} more characters]"


def printable_lines(text: str) -> str:
    """Escape untrusted text of several lines: apply `printable` to each line."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Escape JSON text for terminals. Each non-printable character is replaced by a JSON escape with the same
    meaning."""
    return text if text.isprintable() else _PLAIN.sub(_escaped_json, text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _escaped_json(found: re.Match[str]) -> str:
    char = found[0]
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))
