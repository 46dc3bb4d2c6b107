"""Lists the benchmarks, or runs one: `make bench [NAME=fork ARGS="--rounds 3"]`, `python -m bench [NAME FLAGS]`."""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import run

FOLDER = Path(__file__).parent
GROUPS = ("peers", "services", "core", "gpu")


def benchmarks() -> dict[str, Path]:
    """Return the file of each benchmark, by name. Modules without a `main` or `report` function are helpers."""
    return {path.stem: path for group in GROUPS for path in sorted((FOLDER / group).glob("*.py")) if _is_one(path)}


def _is_one(path: Path) -> bool:
    found = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    return not found.isdisjoint({"main", "report"})


def purpose(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def listing() -> str:
    lines = ["make bench NAME=name [ARGS=flags]; --help in ARGS says which flags there are"]
    every = benchmarks()
    for group in GROUPS:
        lines += ["", f"{group}: {purpose(FOLDER / group / '__init__.py')}"]
        found = {name: path for name, path in every.items() if path.parent.name == group}
        lines += [f"  {name.replace('_', '-'):18} {purpose(path)}" for name, path in found.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(listing())
        return 0
    name, *flags = arguments
    path = benchmarks().get(name.replace("-", "_"))
    if path is None:
        print(f"there is no benchmark {name!r}; python -m bench lists them", file=sys.stderr)
        return 2
    return run(path.stem, importlib.import_module(f"bench.{path.parent.name}.{path.stem}"), flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
