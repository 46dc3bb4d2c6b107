"""Compile the Triton kernels of the given modules of checks for an H200, without having one.

    python -m tests.kernels.triton.compilation [--pairs] [MODULE...]

Without modules, all are compiled. This runs in a process of its own, because Triton interprets in the process of the
tests. The program prints the resources of each variant, one per line. It exits with status 1 if a variant does not
compile or uses more than its case permits. `--pairs` compiles fewer variants: see `in_pairs`. `--unlimited` permits any
use of resources: these depend on the compiler, and the limits are for the Triton in constraints.txt.
"""

import argparse
import importlib
import itertools
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from testing import kernel_checks
from testing.kernel_checks.case import CompileCase

H200 = GPUTarget("cuda", 90, 32)
CHECKS = Path(kernel_checks.__file__).parent
MODULES = sorted(path.stem for path in CHECKS.glob("*.py") if path.stem not in {"__init__", "case"})
MAX_SHARED_MEMORY = 227 * 1024  # of a program
# Limits of a processor. Each program uses 1 KB of shared memory in addition to its own.
SHARED_MEMORY = 228 * 1024
NUM_REGISTERS = 64 * 1024
NUM_THREADS = 2048
MAX_PROGRAMS = 32


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled variant.

    Attributes:
        shared: bytes of shared memory per program.
        registers, stack: registers per thread, and bytes of stack per thread, which contain spilled registers.
        num_threads: threads per program.
        waits: for each loop with asynchronous loads, the number of groups of loads that may still be in progress at the
            loop's strictest wait. 0 means that no load overlaps with the computation.
    """

    shared: int
    registers: int
    stack: int
    num_threads: int
    waits: tuple[int, ...]

    @property
    def num_programs(self) -> int:
        """The number of programs that fit a processor at the same time."""
        of_thread = -(-self.registers // 8) * 8  # registers are allocated in units of eight
        by_registers, by_threads = NUM_REGISTERS // (of_thread * self.num_threads), NUM_THREADS // self.num_threads
        return min(by_registers, by_threads, SHARED_MEMORY // (self.shared + 1024), MAX_PROGRAMS)

    def __str__(self) -> str:
        waits = f", waits for all but {', '.join(map(str, self.waits))}" if self.waits else ""
        return (
            f"{self.shared} bytes of shared memory, {self.registers} registers, {self.stack} bytes of stack, "
            f"{self.num_programs} programs a processor{waits}"
        )

    def check(self, case: CompileCase) -> None:
        """Raise ValueError if the resources exceed what the case permits."""
        if self.shared > MAX_SHARED_MEMORY:
            raise ValueError(f"needs {self.shared} bytes of shared memory; a program has at most {MAX_SHARED_MEMORY}")
        if self.stack > case.max_stack:
            raise ValueError(f"spills {self.stack} bytes; it may spill {case.max_stack}: {self}")
        if self.num_programs < case.min_programs:
            raise ValueError(f"{case.min_programs} programs are to fit a processor: {self}")
        if case.overlaps and (not self.waits or 0 in self.waits):
            raise ValueError(f"loads nothing while it computes: {self}")


def compile_case(case: CompileCase, is_limited: bool = True) -> Resources:
    """Return the resources of the compiled variant.

    Raises Triton's errors, or ValueError if the resources exceed what the case permits.
    """
    names = case.kernel.arg_names
    differing = {*case.signature, *case.constexprs} ^ set(names)
    if differing:
        raise ValueError(f"the arguments given and those of the kernel differ: {sorted(differing)}")
    signature = {name: types_of(case.signature.get(name)) for name in names}
    constants: dict[tuple[int, ...], object] = {(names.index(name),): value for name, value in case.constexprs.items()}
    attributes = {}
    for path, name, kind in leaves(case.signature):
        path = (names.index(path[0]), *path[1:])
        if kind is None:
            constants[path] = None
        elif kind.startswith("*") or name in case.divisible_by_16:
            attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=H200, options=options)
    used = registers(compiled.asm["cubin"])
    resources = Resources(compiled.metadata.shared, *used, 32 * case.num_warps, loop_waits(compiled.asm["ttgir"]))
    if is_limited:
        resources.check(case)
    return resources


def loop_waits(text: str) -> tuple[int, ...]:
    """Return the lowest number of each loop's asynchronous waits in Triton's intermediate form.

    Loops without waits are left out. A wait belongs to the innermost loop around it. MLIR's printer indents the body of
    a loop by more than the loop.
    """
    found: list[list[int]] = []
    open_loops: list[tuple[int, list[int]]] = []  # indentation of the loop, and its waits
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip())
        while open_loops and line.strip() and indentation <= open_loops[-1][0]:
            open_loops.pop()
        if "scf.for" in line:
            open_loops.append((indentation, []))
            found.append(open_loops[-1][1])
        wait = re.search(r"ttg\.async_wait.*\bnum = (\d+)", line)
        if wait and open_loops:
            open_loops[-1][1].append(int(wait[1]))
    return tuple(min(waits) for waits in found if waits)


def types_of(kind: object) -> object:
    """Return the types of an argument in the form that Triton expects; None becomes a constant."""
    if isinstance(kind, tuple):
        types = map(types_of, kind)
        return type(kind)(*types) if hasattr(kind, "_fields") else tuple(types)
    return "constexpr" if kind is None else kind


def leaves(signature: dict[str, object]) -> Iterator[tuple[tuple, str, str | None]]:
    """Yield path, name and type of every argument or field that is not a tuple.

    A field without a name has its tuple's name.
    """

    def within(path: tuple, name: str, kind: object) -> Iterator[tuple[tuple, str, str | None]]:
        if isinstance(kind, tuple):
            fields = getattr(kind, "_fields", (name,) * len(kind))
            for index, (field, inner) in enumerate(zip(fields, kind, strict=True)):
                yield from within((*path, index), field, inner)
        else:
            yield path, name, kind

    for name, kind in signature.items():
        yield from within((name,), name, kind)


def registers(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread, and the bytes that a thread spills to its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump tells no use of resources: {usage}")
    return int(found[1]), int(found[2])


def in_pairs(cases: Iterable[CompileCase]) -> list[CompileCase]:
    """Return cases of each kernel that together have every pair of values that occurs in any case.

    A pair consists of two traits in which variants differ: an argument's type, a constant, or a launch option.
    """
    chosen = []
    kernel_of = attrgetter("kernel.__name__")
    for _, group in itertools.groupby(sorted(cases, key=kernel_of), kernel_of):
        pool = [(case, set(itertools.combinations_with_replacement(traits(case), 2))) for case in group]
        while any(lacking for _, lacking in pool):
            best, found = max(pool, key=lambda entry: len(entry[1]))
            chosen.append(best)
            pool = [(case, lacking - found) for case, lacking in pool]
    return chosen


def traits(case: CompileCase) -> list[tuple[str, str]]:
    """Return the traits of a variant, each with its name."""
    launch = {"num_warps": case.num_warps, "num_stages": case.num_stages, "max_stack": case.max_stack}
    given = case.signature | case.constexprs | launch
    return sorted((".".join(map(str, (*path, name))), str(kind)) for path, name, kind in leaves(given))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--unlimited", action="store_true")
    parser.add_argument("modules", nargs="*", default=MODULES)
    arguments = parser.parse_args()
    status = 0
    for name in arguments.modules:
        cases = importlib.import_module(f"testing.kernel_checks.{name}").compile_cases()
        for case in in_pairs(cases) if arguments.pairs else cases:
            try:
                print(f"{case.name}: {compile_case(case, not arguments.unlimited)}", flush=True)
            except Exception:
                print(f"{case.name}: FAILED\n{traceback.format_exc()}", flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
