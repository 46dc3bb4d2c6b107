"""Planting of bugs in the current source, by its syntax, and a check that a simulator finds each bug.

The position and layout of a function do not matter. A bug that does not have exactly one place is an error, so that no
bug silently becomes a no-op when the code changes. The seed that last found a bug is tried first, so that a run with
few seeds checks every bug too. This seed may miss the bug because scenarios are drawn differently or the simulator no
longer detects it. Then the seeds that once found a defect are tried, and the given number of further seeds.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from testing.sources import parse, sources

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Patch:
    """A replacement of `old` by `new` in the function with this name, in any module.

    `old` is an expression or consecutive statements, and `new` may be empty. If other functions of this name contain
    the same code, `function` includes the class name.
    """

    function: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    patches: tuple[Patch, ...]


def mutant(name: str, function: str, old: str, new: str) -> Mutant:
    return Mutant(name, (Patch(function, old, new),))


@dataclass(frozen=True, slots=True)
class Planting:
    """The bugs of one simulator."""

    mutants: tuple[Mutant, ...]
    found_by: Path  # a JSON file with the seed that finds each bug
    known_seeds: Collection[int]  # that once found defects
    campaign: str  # the campaign's module
    copied: tuple[str, ...]  # the folders from which a simulation imports code
    planted_in: tuple[str, ...]  # the folders and modules under simulation

    def recorded_seeds(self) -> dict[str, int]:
        """Return the seed that finds each bug, by the bug's name."""
        return json.loads(self.found_by.read_text()) if self.found_by.exists() else {}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a patch's old syntax: entries of a list field of a node, or the whole field if it is not a list."""

    node: ast.AST
    field: str
    start: int

    def put(self, num_old: int, new: list[ast.AST]) -> None:
        entries = getattr(self.node, self.field)
        if isinstance(entries, list):
            entries[self.start : self.start + num_old] = new or [ast.Pass()]
        else:
            setattr(self.node, self.field, new[0])


def _nodes(patch: Patch) -> tuple[list[ast.AST], list[ast.AST]]:
    """Return the old and the new syntax: an expression each, or statements."""
    old, new = ast.parse(patch.old).body, ast.parse(patch.new).body
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        return [old[0].value], [new[0].value]
    return [*old], [*new]


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions below a node with their qualified names, which begin with a dot."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
        yield from _functions(child, name)


def places(tree: ast.Module, patch: Patch) -> Iterator[Place]:
    """Yield the places of a module that contain the patch's old syntax."""
    wanted = [ast.dump(node) for node in _nodes(patch)[0]]
    for name, function in _functions(tree):
        if not name.endswith(f".{patch.function}"):
            continue
        for node in ast.walk(function):
            for field, value in ast.iter_fields(node):
                entries = value if isinstance(value, list) else [value]
                found = [ast.dump(entry) if isinstance(entry, ast.AST) else "" for entry in entries]
                for start in range(len(found) - len(wanted) + 1):
                    if found[start : start + len(wanted)] == wanted:
                        yield Place(node, field, start)


@cache
def _modules_by_function(planted_in: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return the modules that contain functions of a name, by the name without a class."""
    modules: dict[str, list[Path]] = {}
    for path in sources(*planted_in):
        for name in {name.rpartition(".")[2] for name, _ in _functions(parse(path))}:
            modules.setdefault(name, []).append(path)
    return modules


def _modules(planting: Planting, patch: Patch) -> list[Path]:
    """Return the modules that contain the patch's old syntax, once for each place."""
    named = _modules_by_function(planting.planted_in).get(patch.function.rpartition(".")[2], [])
    return [path for path in named for _ in places(parse(path), patch)]


def misplaced(planting: Planting, mutant: Mutant) -> str:
    """Return the reason why the mutant cannot be planted, or an empty text."""
    for patch in mutant.patches:
        found = _modules(planting, patch)
        if len(found) != 1:
            where = f" ({', '.join(map(str, found))})" if found else ""
            return f"{mutant.name}: {patch.function} has this {len(found)} times, not once{where}:\n{patch.old}\n"
    return ""


def planted(source: str, patch: Patch) -> str:
    """Return the module's source with the bug."""
    tree = ast.parse(source)
    [place] = places(tree, patch)
    old, new = _nodes(patch)
    place.put(len(old), new)
    return ast.unparse(tree)


def _plant(planting: Planting, mutant: Mutant, folder: Path) -> None:
    """Copy the code that the simulator needs, and plant the bug in the copy."""
    for part in planting.copied:
        # While Python writes a module's bytecode, the file has a temporary name.
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    (folder / "tests" / "__init__.py").touch()
    for patch in mutant.patches:
        [module] = _modules(planting, patch)
        path = folder / module
        path.write_text(planted(path.read_text(), patch))


@dataclass(frozen=True, slots=True)
class _Catch:
    """The first failing seed, its position among the tried seeds, and the error."""

    seed: int
    number: int
    error: str


def _hunt(planting: Planting, mutant: Mutant, recorded: int | None, num_seeds: int, first: int) -> _Catch | str:
    """Try the recorded seed, the known seeds, and then `num_seeds` seeds from `first` on.

    Returns the catch, or a text: the reason why the mutant could not be run, or an empty text if no seed found it.
    """
    seeds = [*([] if recorded is None else [recorded]), *planting.known_seeds, *range(first, first + num_seeds)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _plant(planting, mutant, folder)
        program = (
            "import json\n"
            f"from {planting.campaign} import CAMPAIGN\n"
            f"for number, seed in enumerate({seeds}, start=1):\n"
            "    for error in CAMPAIGN.run_seed(seed).failures.values():\n"
            "        print(json.dumps([seed, number, error]))\n"
            "        raise SystemExit\n"
        )
        environment = {**os.environ, "PYTHONPATH": name}
        run = subprocess.run(
            [sys.executable, "-"],
            input=program,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            return f"could not run: {run.stderr[-1000:]}"
        return _Catch(*json.loads(run.stdout)) if run.stdout else ""


def _verdict(catch: _Catch | str, recorded: int | None) -> str:
    stale = "" if recorded is None else f"seed {recorded} finds it no more"
    if not isinstance(catch, _Catch):
        remedy = "; does the simulator still look for it? more SEEDS may find another seed, which ARGS=--record writes"
        return catch or f"NOT CAUGHT: {stale or 'no seed is recorded'}{remedy}"
    error = f"caught by seed {catch.seed}, number {catch.number}: {catch.error[:100]}".replace("\n", " ")
    return (
        error if catch.seed == recorded else f"{error}; {stale or 'it was not recorded'}: ARGS=--record writes this one"
    )


def hunt_all(planting: Planting, program: str) -> int:
    """Look for each bug as the command line specifies; return the exit status."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of mutants; all by default")
    parser.add_argument("--seeds", type=int, default=5000, help="at most so many seeds each (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument(
        "--record", action="store_true", help=f"write the seeds that found them to {planting.found_by.name}"
    )
    arguments = parser.parse_args()
    chosen = [m for m in planting.mutants if not arguments.names or any(name in m.name for name in arguments.names)]
    if faults := "".join(misplaced(planting, each) for each in chosen):
        raise SystemExit(faults)
    found_by, started, num_caught = planting.recorded_seeds(), time.perf_counter(), 0
    caught_by = dict(found_by)

    def hunt(mutant: Mutant) -> _Catch | str:
        return _hunt(planting, mutant, found_by.get(mutant.name), arguments.seeds, arguments.first)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, catch in zip(chosen, pool.map(hunt, chosen), strict=True):
            print(f"{mutant.name}: {_verdict(catch, found_by.get(mutant.name))}", flush=True)
            if isinstance(catch, _Catch):
                num_caught += 1
                caught_by[mutant.name] = catch.seed
    if arguments.record:
        kept = {mutant.name: caught_by[mutant.name] for mutant in planting.mutants if mutant.name in caught_by}
        planting.found_by.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{num_caught} of {len(chosen)} caught in {time.perf_counter() - started:.0f} s")
    return 0 if num_caught == len(chosen) else 1
