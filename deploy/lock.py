"""Writes constraints.txt, the versions that are used here of all that pyproject.toml names and of what that brings, and
deploy/requirements/*.lock, which the images install: the same versions, with their hashes.

    make lock       # of ARGS, `--upgrade` takes the newest versions, `--upgrade-package NAME` that of one package

It asks the package index that uv is configured for. Run it after a change of pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path("deploy", "requirements")
CONSTRAINTS = Path("constraints.txt")
# The extras of pyproject.toml that a lock is made of. Pods fetch models by `hf download`.
LOCKS = {
    "scheduler": ["scheduler", "router", "hub"],
    "scheduler-tracing": ["scheduler", "router", "hub", "tracing"],
    "worker": ["worker", "hub"],
    "worker-tracing": ["worker", "hub", "tracing"],
    "serve": ["serve"],
}
# What torch brings for CUDA alone, and torch itself: an image for CPUs takes it from an index of such builds.
CUDA = re.compile(r"^((?:nvidia|cuda)-[a-z0-9-]+|triton|torch)==", re.MULTILINE)


def compile_versions(target: Path, *options: str) -> None:
    """One file, of a stated source. What need not change stays as it was."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    header = "--custom-compile-command=make lock"
    subprocess.run([*command, header, f"--output-file={target}", *options], cwd=ROOT, check=True)
    print(target)


def compile_lock(name: str, *options: str) -> None:
    target = REQUIREMENTS / f"{name}.lock"
    compile_versions(target, f"--constraint={CONSTRAINTS}", "--generate-hashes", "--no-annotate", *options)


def main(options: list[str]) -> None:
    # Which Triton stands beside torch is torch's to say: see pyproject.toml.
    alone = ["--strip-extras", "--no-annotate", "--no-emit-package=triton"]
    compile_versions(CONSTRAINTS, "pyproject.toml", "--extra=dev", *alone, *options)
    for name, extras in LOCKS.items():
        compile_lock(name, "pyproject.toml", *(f"--extra={extra}" for extra in extras))
    cuda = CUDA.findall((ROOT / REQUIREMENTS / "worker.lock").read_text())
    without = [f"--no-emit-package={name}" for name in cuda]
    compile_lock("worker-cpu", "pyproject.toml", *(f"--extra={extra}" for extra in LOCKS["worker"]), *without)
    compile_lock("build", str(REQUIREMENTS / "build.in"))


if __name__ == "__main__":
    main(sys.argv[1:])
