"""Counts what the house consists of: statements, modules, names, Protocols. `python -m tests.project.counts` prints.

Given the root of another checkout, it counts that. `test_counts.py` holds each count to the ceilings below, which are
what the house has: a change that needs more of something says so by raising its ceiling.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.project.sources import PACKAGES, ROOT, module_name, parse, sources, walk


class Ceiling(NamedTuple):
    """The most that there may be of something, and what needs so much of it. One that is raised gets a new reason."""

    number: int
    reason: str


# Statements by ast; docstrings, comments and formatting do not count.
MAX_STATEMENTS = {
    "scheduler_service": Ceiling(
        12_861,
        "a core that simulators drive, blocks given one by one, doors for gRPC, vLLM, front ends and tenants; the "
        "OpenAI API over HTTP, field by field, with tokens and texts that are ruled out; detached requests by any "
        "door, HTTP's too; calls of some tools in chats, budgets; Anthropic's form of them, and Responses, kept "
        "and in background, bounded by tenant; names of formats that agree; bodies of any depth; a bound on "
        "answers that are not read; those told that are not kept; several names of a model; "
        "rows that swap nothing; work in turns by tenant within bounds on bytes and answers, HTTP by RFC 9112's "
        "framing; what Claude Code and Codex ask for",
    ),
    "worker_service": Ceiling(
        6_133, "weights from three kinds of files, on CPUs and GPUs, by ranks, in graphs; compilers"
    ),
    "pagewire/kernels": Ceiling(
        3_652,
        "a specification in torch of each kernel, it in C and in Triton, compilers, and builds that failed remembered",
    ),
    "pagewire/common": Ceiling(
        6_795,
        "29 architectures, each composed over its checkpoint's names, GGUF, transport, operators' sockets, tracing, "
        "limits, templates, up to a last message; calls of tools in thirteen formats, reasoning, told by templates or "
        "names, read, "
        "ended, also beside formats of one's own; each field of tags checked; "
        "JSON of strangers, of any depth; what hangs on sampling options "
        "alone, which clients and the scheduler had a part of each; histories of agents in the form of each template; "
        "a budget of schemas, outputs of any length in linear time, surrogates, types of messages",
    ),
    "pagewire": Ceiling(
        5_154,
        "client, commands, one of which serves a model for a chat, their completion, files that hide modules, `LLM` "
        "with vLLM's beam search, metrics, defaults, and embeddings under its other name, chats that go on, what runs "
        "services, "
        "benchmarks; a front end for HTTP beside `serve`; what a private server may see, and how it ended; "
        "records that are no results",
    ),
}
MAX_MODULES_IN_ALL = Ceiling(396, "a noun each, edits of messages and called tools the last")
MAX_TYPE_NAMES_TWICE = Ceiling(8, "`TWICE` of `test_counts.py` has the reason of each")
MAX_FUNCTION_NAMES_TWICE = Ceiling(
    48,
    "a kernel has the name of its specification, and modules of one kind have one entry: `main`, `create`, `serve`, "
    "`read_calls`, `call_tag`",
)
MAX_PROTOCOLS = Ceiling(14, "what has several implementations, as writers of answers, or fakes that tests name")
MAX_FUNCTION_LINES = 60
MAX_NETWORK_LINES = 40  # of a function in `common/network`: what a model is reads from top to bottom
MAX_MODULES = 20  # of a folder

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
    return {package: sum(statements(parse(path, root)) for path in sources(package, root=root)) for package in PACKAGES}


def classes(root: Path = ROOT, folders: tuple[str, ...] = PACKAGES) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields every class with the name of its module, also classes inside functions and other classes."""
    for path in sources(*folders, root=root):
        for node in walk(parse(path, root)):
            if isinstance(node, ast.ClassDef):
                yield module_name(path), node


def type_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names of classes, and of what a module gives a name of its own to by an assignment: aliases, named
    tuples, new types.
    """
    yield from (node.name for node in walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (target.id for target in targets if isinstance(target, ast.Name))
            yield from (name for name in names if re.fullmatch("_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def function_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names of a module's functions that others may call."""
    yield from (node.name for node in tree.body if isinstance(node, Function) and not node.name.startswith("_"))


def names_twice(names_of: Callable[[ast.Module], Iterator[str]], root: Path = ROOT) -> dict[str, list[str]]:
    """Returns the names that several modules define, or one of them twice, each with these modules."""
    modules = defaultdict(list)
    for path in sources(*PACKAGES, root=root):
        for name in names_of(parse(path, root)):
            modules[name].append(module_name(path))
    return {name: found for name, found in sorted(modules.items()) if len(found) > 1}


def protocols(root: Path = ROOT) -> dict[str, ast.ClassDef]:
    """Returns the Protocols by module and name, such as `scheduler_service.serving.engine.RequestEngine`."""
    found = ((f"{module}.{node.name}", node) for module, node in classes(root))
    return {name: node for name, node in found if _is_protocol(node)}


def implementations() -> dict[str, list[str]]:
    """Returns, by Protocol, the classes that have or inherit all of its members, fakes of tests included."""
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
    """Returns the members of a class's base classes, which are known by their names."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    return set().union(*(own[base] for base in bases if base in own))


def members(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class gives its instances: methods, attributes of the class, and `self.NAME = ...`."""
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
    """Returns the functions with more lines than are allowed. A kernel's parameters have a line each, and do not
    count.
    """
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
    """Returns whether Triton compiles the function."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def main(root: Path) -> None:
    by_package = statements_by_package(root)
    for package, number in by_package.items():
        print(f"{number:7} statements in {package}")
    print(f"{sum(by_package.values()):7} statements in all")
    print(f"{len(sources(*PACKAGES, root=root)):7} modules")
    for what, names_of in (("types", type_names), ("functions", function_names)):
        twice = names_twice(names_of, root)
        print(f"{len(twice):7} names of {what} defined twice: {', '.join(twice)}")
    print(f"{len(protocols(root)):7} Protocols: {', '.join(name.rpartition('.')[2] for name in protocols(root))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
