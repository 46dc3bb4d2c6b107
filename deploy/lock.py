"""Writes deploy/requirements/*.lock, which the images install: every package pinned, with its hashes.

    python -m pip install uv==0.13.9
    python deploy/lock.py

It asks the package index that uv is configured for. Run it after a change of pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path("deploy", "requirements")
# The extras of pyproject.toml that a lock is made of.
LOCKS = {
    "scheduler": [],
    "scheduler-tracing": ["tracing"],
    "worker": ["worker"],
    "worker-tracing": ["worker", "tracing"],
    "serve": ["worker", "gateway"],
}
# What torch brings for CUDA alone, and torch itself: an image for CPUs takes it from an index of such builds.
CUDA = re.compile(r"^((?:nvidia|cuda)-[a-z0-9-]+|triton|torch)==", re.MULTILINE)


def compile_lock(name: str, *options: str) -> None:
    """One file, of a stated source. What is not changed by pyproject.toml stays as it was."""
    target = REQUIREMENTS / f"{name}.lock"
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]
    header = "--custom-compile-command=python deploy/lock.py"
    subprocess.run([*command, header, f"--output-file={target}", *options], cwd=ROOT, check=True)
    print(target)


def main() -> None:
    for name, extras in LOCKS.items():
        compile_lock(name, "pyproject.toml", *(f"--extra={extra}" for extra in extras))
    cuda = CUDA.findall((ROOT / REQUIREMENTS / "worker.lock").read_text())
    without = [f"--no-emit-package={name}" for name in cuda]
    compile_lock("worker-cpu", "pyproject.toml", "--extra=worker", *without)
    for name in ("gateway", "build"):
        compile_lock(name, str(REQUIREMENTS / f"{name}.in"))


if __name__ == "__main__":
    sys.exit(main())
