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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.triton.checks.case import CompileCase

H200 = GPUTarget("cuda", 90, 32)
MAX_SHARED_MEMORY = 227 * 1024


def compile_case(case: CompileCase) -> str:
    """What the compiled variant needs. Raises what Triton raises, or ValueError where it could not be launched."""
    names = case.kernel.arg_names
    unknown = {*case.signature, *case.constexprs, *case.divisible_by_16} ^ set(names)
    if unknown - set(names) or set(names) - set(case.signature) - set(case.constexprs):
        raise ValueError(f"the arguments given and those of the kernel differ: {sorted(unknown)}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    pointers = [name for name, kind in case.signature.items() if kind.startswith("*")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *case.divisible_by_16)}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=H200, options=options)
    shared = compiled.metadata.shared
    if shared > MAX_SHARED_MEMORY:
        raise ValueError(f"needs {shared} bytes of shared memory; a program has at most {MAX_SHARED_MEMORY}")
    return f"{shared} bytes of shared memory, {registers(compiled.asm['cubin'])}"


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
