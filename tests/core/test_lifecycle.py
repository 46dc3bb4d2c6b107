"""One writer of a group's state."""

import ast
from pathlib import Path

CORE = Path(__file__).parents[2] / "scheduler_service" / "core"


def writers(attribute: str) -> dict[str, list[str]]:
    """The functions that assign an attribute of this name, by module."""
    found: dict[str, list[str]] = {}
    for path in CORE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == attribute
                for node in ast.walk(function)
            ):
                found.setdefault(path.relative_to(CORE).as_posix(), []).append(function.name)
    return found


def test_a_groups_state_is_changed_in_one_function():
    assert writers("state") == {"lifecycle.py": ["_enter"]}
    assert "reset" in writers("moved_step")["sequence.py"], "an assignment of several is not seen"
