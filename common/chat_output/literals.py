"""Values as models write them outside of JSON."""

import ast
import json
import re
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
# Models pad months and days, which neither language has.
_PADDED = re.compile(r"(-?)0+([0-9]+)")


def json_of(text: str) -> str | None:
    """Return as JSON what a text says in JSON or in Python. None: it says nothing."""
    text = text.strip()
    if padded := _PADDED.fullmatch(text):
        return padded[1] + padded[2]
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(_InJson().visit(ast.parse(text, mode="eval")))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _InJson(ast.NodeTransformer):
    """Makes what Python alone has of what JSON has too."""

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.List([self.visit(element) for element in node.elts], ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _refuse(constant: str) -> Any:
    """JSON has no NaN or Infinity."""
    raise ValueError(constant)
