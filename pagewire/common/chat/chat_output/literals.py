"""Values as models write them outside of JSON."""

import ast
import json
import re
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
# The parser of Python takes about 3 microseconds a character outside of strings, and holds the interpreter's lock.
_MAX_PYTHON_CHARS = 6000
# A string in quotes, or a comment. A string without an end extends to the end of the text, so that no part of it is
# scanned again.
_IN_QUOTES = re.compile(
    r"""'''(?:[^'\\]|\\.|'(?!''))*+(?:''')?|\"{3}(?:[^"\\]|\\.|"(?!""))*+(?:\"{3})?"""
    r"""|'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?|\#[^\r\n]*""",
    re.DOTALL,
)
# The beginning of a formatted string: its code would be parsed, and can have strings of its own.
_FORMATTED = re.compile(r"[ft]r?''", re.IGNORECASE)


def json_of(text: str) -> str | None:
    """Return the value of a text in JSON or in Python as JSON. None: the text is no value, or is Python with more than
    `_MAX_PYTHON_CHARS` characters outside of strings."""
    text = _unpadded(text.strip())
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    outside = _IN_QUOTES.sub("''", text)
    if len(outside) > _MAX_PYTHON_CHARS or _FORMATTED.search(outside):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(_InJson().visit(ast.parse(text, mode="eval")))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _unpadded(text: str) -> str:
    """Remove the zeros in front of an integer. Models pad months and days, which neither language allows."""
    digits = text.removeprefix("-")
    if not (digits.startswith("0") and digits.isascii() and digits.isdecimal()):
        return text
    return text[: len(text) - len(digits)] + (digits.lstrip("0") or "0")


class _InJson(ast.NodeTransformer):
    """Makes what Python alone has of what JSON has too."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List([self.visit(element) for element in node.elts], ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _refuse(constant: str) -> Any:
    """JSON has no NaN or Infinity."""
    raise ValueError(constant)
