"""Text from outside as a log or a terminal is given it: in one line, and with no code that a terminal obeys."""

import re

# Of a longer text, the rest is left out.
MAX_CHARS = 8192
_PLAIN = re.compile("[^ -~]")


def printable(text: str) -> str:
    """Write every character that is not printed as Python's escape for it, and cut what is longer than a line can be.

    These are line ends, control characters, marks that turn the direction of writing, and halves of surrogate pairs.
    """
    text = shortened(text)
    return text if text.isprintable() else _PLAIN.sub(_escaped, text)


def shortened(text: str) -> str:
    """Cut what is longer than a line can be."""
    num_left_out = len(text) - MAX_CHARS
    return text if num_left_out <= 0 else f"{text[:MAX_CHARS]} [{num_left_out} more characters]"


def printable_lines(text: str) -> str:
    """Write each line of a text as `printable` does."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Write JSON whose strings show no such character, and mean the same."""
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
