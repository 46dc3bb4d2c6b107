"""Compiles the kernels of the modules of checks that are named for an H200, without one.

Run as a process of its own, `python -m tests.kernels.triton.compilation MODULE...`: in that of the tests Triton
interprets. Prints a line per variant, and ends with status 1 if one does not compile.
"""

import importlib
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton.checks.case import CompileCase

H200 = GPUTarget("cuda", 90, 32)
MAX_SHARED_MEMORY = 227 * 1024


def compile_case(case: CompileCase) -> str:
    """What the compiled variant needs. Raises what Triton raises, or ValueError where it could not be launched."""
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
    shared = compiled.metadata.shared
    if shared > MAX_SHARED_MEMORY:
        raise ValueError(f"needs {shared} bytes of shared memory; a program has at most {MAX_SHARED_MEMORY}")
    return f"{shared} bytes of shared memory, {registers(compiled.asm['cubin'])}"


def types_of(kind: object) -> object:
    """The types of an argument as Triton takes them: what is None is a constant."""
    if isinstance(kind, tuple):
        types = map(types_of, kind)
        return type(kind)(*types) if hasattr(kind, "_fields") else tuple(types)
    return "constexpr" if kind is None else kind


def leaves(signature: dict[str, object]) -> Iterator[tuple[tuple, str, str | None]]:
    """Path, name and type of all that is no tuple: of an argument or a field; one without a name has its tuple's."""

    def within(path: tuple, name: str, kind: object) -> Iterator[tuple[tuple, str, str | None]]:
        if isinstance(kind, tuple):
            fields = getattr(kind, "_fields", (name,) * len(kind))
            for index, (field, inner) in enumerate(zip(fields, kind, strict=True)):
                yield from within((*path, index), field, inner)
        else:
            yield path, name, kind

    for name, kind in signature.items():
        yield from within((name,), name, kind)


def registers(cubin: bytes) -> str:
    """What a thread has, and what it spills to its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump tells no use of resources: {usage}")
    return f"{found[1]} registers, {found[2]} bytes of stack"


def main(modules: list[str]) -> int:
    status = 0
    for name in modules:
        module = importlib.import_module(f"tests.kernels.triton.checks.{name}")
        for case in module.compile_cases():
            try:
                print(f"{case.name}: {compile_case(case)}", flush=True)
            except Exception:
                print(f"{case.name}: FAILED\n{traceback.format_exc()}", flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
