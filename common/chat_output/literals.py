"""Values as models write them outside of JSON."""

import ast
import json
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}


def json_of(text: str) -> str | None:
    """Return as JSON what a text says in JSON or in Python. None: it says nothing."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(_Names().visit(ast.parse(text, mode="eval")))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


class _Names(ast.NodeTransformer):
    """JSON's names for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _refuse(constant: str) -> Any:
    """JSON has no NaN or Infinity."""
    raise ValueError(constant)
