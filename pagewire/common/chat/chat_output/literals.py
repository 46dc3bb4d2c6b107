"""A converter for values that models write as JSON or as Python literals."""

import ast
import json
import re
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
# Python's parser needs about 3 microseconds for each character outside of strings, and holds the GIL.
_MAX_PYTHON_CHARS = 6000
# A string in quotes, or a comment. A string without an end extends to the end of the text, so that no character is
# scanned twice.
_IN_QUOTES = re.compile(
    r"""'''(?:[^'\\]|\\.|'(?!''))*+(?:''')?|\"{3}(?:[^"\\]|\\.|"(?!""))*+(?:\"{3})?"""
    r"""|'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?|\#[^\r\n]*""",
    re.DOTALL,
)
# The beginning of an f-string or t-string. Python would parse the code in it, which can contain further strings.
_FORMATTED = re.compile(r"[ft]r?''", re.IGNORECASE)


def json_of(text: str) -> str | None:
    """Convert the text of a value, which a model wrote as JSON or as a Python literal, to JSON. Return None if the text
    is neither, or if it is Python with more than `_MAX_PYTHON_CHARS` characters outside of strings. The limit exists
    because Python's parser is slow and holds the GIL.
    """
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
            warnings.simplefilter("ignore")  # warnings about unknown escapes
            value = ast.literal_eval(_InJson().visit(ast.parse(text, mode="eval")))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _unpadded(text: str) -> str:
    """Remove the leading zeros from the text of an integer, such as "07". Models write months and days this way, but
    JSON and Python do not allow leading zeros. Other texts are returned unchanged.
    """
    digits = text.removeprefix("-")
    if not (digits.startswith("0") and digits.isascii() and digits.isdecimal()):
        return text
    return text[: len(text) - len(digits)] + (digits.lstrip("0") or "0")


class _InJson(ast.NodeTransformer):
    """A transformer of Python's syntax tree that replaces nodes without an equivalent in JSON. Sets become lists. The
    names true, false and null become constants.
    """

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List([self.visit(element) for element in node.elts], ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _refuse(constant: str) -> Any:
    """Raise ValueError for the constant NaN or Infinity, because JSON does not allow these constants."""
    raise ValueError(constant)
