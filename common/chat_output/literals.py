"""Values as models write them outside of JSON."""

import ast
import json
from typing import Any


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
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _refuse(constant: str) -> Any:
    """JSON has no NaN or Infinity."""
    raise ValueError(constant)
