"""Plants bugs in the source as it stands, by its syntax, and sees that a simulator finds each.

Where a function lies and how it is laid out does not matter. A bug that has not exactly one place is an error, so that
none quietly becomes a no-op when the code changes. The seed that last found a bug is tried first, so that a run with
few seeds looks at every bug too. Where it finds it no more, because scenarios are drawn in another way or the simulator
has become blind to it, those that once found a defect are tried, and then as many as are asked for.
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
    """In the function of this name, wherever it lies, `old` becomes `new`: an expression, or statements that follow one
    another, which may become none. The name of the class goes before the function's where others have the same code."""

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
    found_by: Path  # the seed that finds each
    known_seeds: Collection[int]  # that once found defects
    campaign: str  # the module of it
    copied: tuple[str, ...]  # the folders of which a simulation takes code
    planted_in: tuple[str, ...]  # the folders and modules of what it simulates

    def recorded_seeds(self) -> dict[str, int]:
        """Return the seed that finds each bug, by the bug's name."""
        return json.loads(self.found_by.read_text()) if self.found_by.exists() else {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a patch's old syntax stands: entries of a field of a node, or all of it where it is no list."""

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
    """The syntax before and after: an expression each, or statements."""
    old, new = ast.parse(patch.old).body, ast.parse(patch.new).body
    if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
        return [old[0].value], [new[0].value]
    return [*old], [*new]


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions below a node, by their qualified names with a point before them."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
        yield from _functions(child, name)


def places(tree: ast.Module, patch: Patch) -> Iterator[Place]:
    """Where a module has what the patch replaces."""
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
    """The modules that have functions of this name, without their classes'."""
    modules: dict[str, list[Path]] = {}
    for path in sources(*planted_in):
        for name in {name.rpartition(".")[2] for name, _ in _functions(parse(path))}:
            modules.setdefault(name, []).append(path)
    return modules


def _modules(planting: Planting, patch: Patch) -> list[Path]:
    """The module that has what the patch replaces, once for each place."""
    named = _modules_by_function(planting.planted_in).get(patch.function.rpartition(".")[2], [])
    return [path for path in named for _ in places(parse(path), patch)]


def misplaced(planting: Planting, mutant: Mutant) -> str:
    """Why the mutant cannot be planted, or nothing."""
    for patch in mutant.patches:
        found = _modules(planting, patch)
        if len(found) != 1:
            where = f" ({', '.join(map(str, found))})" if found else ""
            return f"{mutant.name}: {patch.function} has this {len(found)} times, not once{where}:\n{patch.old}\n"
    return ""


def planted(source: str, patch: Patch) -> str:
    """The module with the bug in it."""
    tree = ast.parse(source)
    [place] = places(tree, patch)
    old, new = _nodes(patch)
    place.put(len(old), new)
    return ast.unparse(tree)


def _plant(planting: Planting, mutant: Mutant, folder: Path) -> None:
    """A copy of what the simulator needs, with the bug in it."""
    for part in planting.copied:
        # Python writes modules' code under another name first.
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    (folder / "tests" / "__init__.py").touch()
    for patch in mutant.patches:
        [module] = _modules(planting, patch)
        path = folder / module
        path.write_text(planted(path.read_text(), patch))


@dataclass(frozen=True, slots=True)
class _Catch:
    """The first seed that failed, which of the seeds that were tried it was, and how."""

    seed: int
    number: int
    error: str


def _hunt(planting: Planting, mutant: Mutant, recorded: int | None, num_seeds: int, first: int) -> _Catch | str:
    """Try the seed that is known to find it, those that found other bugs, and then `num_seeds`, from `first` on. Why it
    could not be tried is a text, which is empty if none found it."""
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
    """Look for each bug, as the command line says. The exit status."""
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
