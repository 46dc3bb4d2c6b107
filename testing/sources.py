"""The Python source of the repository, for the tests of the project."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The packages that are installed and counted. The link `pagewire/kernels` is followed only if it is named itself.
PACKAGES = (
    "scheduler_service",
    "worker_service",
    "pagewire/kernels",
    "pagewire/network",
    "pagewire/common",
    "pagewire",
)
_NO_SOURCES = {"__pycache__", "gen"}  # generated code is read by its own path


def sources(*folders: str, root: Path = ROOT) -> list[Path]:
    """Return the modules in these folders and their subfolders, relative to the root."""
    found = {
        path
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if _NO_SOURCES.isdisjoint(path.relative_to(root / folder).parts)
    }
    return sorted(path.relative_to(root) for path in found)


@cache
def parse(path: Path, root: Path = ROOT) -> ast.Module:
    return ast.parse((root / path).read_text(encoding="utf-8"), filename=str(path))


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree. The result is cached because many tests read each module."""
    return tuple(ast.walk(tree))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of all imports: `from a import b` yields `a.b`."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
