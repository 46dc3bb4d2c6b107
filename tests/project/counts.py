"""Counts of the product's statements, modules, names and Protocols. `python -m tests.project.counts` prints them.

With the root of another checkout as argument, it counts that checkout. `test_counts.py` checks the bounds below.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from testing.sources import PACKAGES, ROOT, module_name, parse, sources, walk

# The product's statements, counted with ast; docstrings, comments and formatting do not count. An issue may raise the
# bound by its stated cost. Last raised for: Ollama's and llama-server's APIs (640), infilling (85), error texts that
# name field, value and remedy (80), keys, templates, hosts and owners of ports (125), chats and status on terminals
# (290), what people run without a new kind of memory (1,360): 27 more architectures, embedders that attend in both
# directions, and the formats of their files, layer groups (465), and states (1,295): the core 290, the worker
# 340, kernels in Triton 175, otherwise 85, five families and their weights 350, messages and reports 50; leases (132):
# the core 87, the worker 30, otherwise 15; calls of closed event loops (5), rows that wait for results instead of being
# preempted (2), a decode step that skips what it does not have (14),
# codes of 6 bits (1), int4 by search (90), its calibration by a text (230), AMX (15).
MAX_STATEMENTS = 40_346
# A larger class should be split, except these, which have one purpose for their callers.
MAX_METHODS = 20
LARGE_CLASSES = {
    "AsyncClient": "the client's calls",
    "Scheduler": "the core's events",
    "Lifecycle": "what may happen to a group",
}
MAX_FUNCTION_LINES = 60
MAX_NETWORK_LINES = 40  # of a function in `pagewire/network`, where a model is described from top to bottom
MAX_MODULES = 20  # in one folder

Function = ast.FunctionDef | ast.AsyncFunctionDef


def statements(tree: ast.AST) -> int:
    nodes = walk(tree)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(
        isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None for node in nodes
    )
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


@cache
def statements_by_package(root: Path = ROOT) -> dict[str, int]:
    found = dict.fromkeys(PACKAGES, 0)
    for path in sources(*PACKAGES, root=root):
        package = next(package for package in PACKAGES if path.is_relative_to(package))
        found[package] += statements(parse(path, root))
    return found


def classes(root: Path = ROOT, folders: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class with the name of its module, including nested classes."""
    for path in sources(*folders, root=root):
        for node in walk(parse(path, root)):
            if isinstance(node, ast.ClassDef):
                yield module_name(path), node


def type_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes, aliases, named tuples and new types."""
    yield from (node.name for node in walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (target.id for target in targets if isinstance(target, ast.Name))
            yield from (name for name in names if re.fullmatch("_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def type_names_twice(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the type names that are defined more than once, each with its modules."""
    modules = defaultdict(list)
    for path in sources(*PACKAGES, root=root):
        for name in type_names(parse(path, root)):
            modules[name].append(module_name(path))
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def protocols(root: Path = ROOT) -> dict[str, ast.ClassDef]:
    """Return the Protocols by qualified name, for example `scheduler_service.serving.engine.RequestEngine`."""
    found = ((f"{module}.{node.name}", node) for module, node in classes(root))
    return {name: node for name, node in found if _is_protocol(node)}


def implementations() -> dict[str, list[str]]:
    """Return, for each Protocol, the classes that have or inherit all of its members, including fakes of tests."""
    found = list(classes(folders=(*PACKAGES, "bench", "testing", "tests")))
    own: dict[str, set[str]] = defaultdict(set)
    for _, node in found:
        own[node.name] |= members(node)
    concrete = [
        (f"{module}.{node.name}", own[node.name] | _inherited(node, own))
        for module, node in found
        if not _is_protocol(node)
    ]
    needed = {protocol: members(node) for protocol, node in protocols().items()}
    return {protocol: [name for name, found in concrete if names <= found] for protocol, names in needed.items()}


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def _inherited(node: ast.ClassDef, own: Mapping[str, set[str]]) -> set[str]:
    """Return the members of a class's base classes. Base classes are identified by name."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    return set().union(*(own[base] for base in bases if base in own))


def members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's members: methods, class attributes, and attributes set by `self.NAME = ...`."""
    found = {child.name for child in node.body if isinstance(child, Function)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            found.add(child.attr)
    for child in node.body:
        targets = [child.target] if isinstance(child, ast.AnnAssign) else getattr(child, "targets", [])
        names = [name for target in targets for name in getattr(target, "elts", [target])]
        found.update(name.id for name in names if isinstance(name, ast.Name))
    return found


def long_functions() -> list[str]:
    """Return the functions that exceed the maximum number of lines. The parameter lines of a kernel do not count."""
    found = []
    for path in sources(*PACKAGES, "bench", "models", "testing"):
        for node in walk(parse(path)):
            if isinstance(node, Function) and node.end_lineno is not None:
                first_line = node.body[0].lineno if is_kernel(node) else node.lineno
                num_lines = node.end_lineno - first_line + 1
                if num_lines > (MAX_NETWORK_LINES if "network" in path.parts else MAX_FUNCTION_LINES):
                    found.append(f"{path}:{node.lineno}: {node.name} has {num_lines} lines")
    return found


def is_kernel(node: Function) -> bool:
    """Return whether Triton compiles the function."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def main(root: Path) -> None:
    by_package = statements_by_package(root)
    for package, number in by_package.items():
        print(f"{number:7} statements in {package}")
    print(f"{sum(by_package.values()):7} statements in all")
    print(f"{len(sources(*PACKAGES, root=root)):7} modules")
    twice = type_names_twice(root)
    print(f"{len(twice):7} names of types defined twice: {', '.join(twice)}")
    print(f"{len(protocols(root)):7} Protocols: {', '.join(name.rpartition('.')[2] for name in protocols(root))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
