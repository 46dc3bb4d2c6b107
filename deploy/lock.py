"""Writes constraints.txt and deploy/requirements/*.lock.

constraints.txt contains the versions of all packages that pyproject.toml names, and of their dependencies. The lock
files, which the images install, contain the same versions with their hashes.

    make lock       # in ARGS, `--upgrade` selects the newest versions, `--upgrade-package NAME` upgrades one package

The script queries the package index for which uv is configured. Run it after each change of pyproject.toml.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path("deploy", "requirements")
CONSTRAINTS = Path("constraints.txt")
# The extras of pyproject.toml in each lock file. Pods download models with `hf download`.
LOCKS = {
    "scheduler": ["scheduler", "router", "hub"],
    "scheduler-tracing": ["scheduler", "router", "hub", "tracing"],
    "worker": ["worker", "hub"],
    "worker-tracing": ["worker", "hub", "tracing"],
    "serve": ["serve"],
}
# Dependencies of torch that only CUDA needs, and torch itself. CPU images install torch from an index of CPU builds.
CUDA = re.compile(r"^((?:nvidia|cuda)-[a-z0-9-]+|triton|torch)==", re.MULTILINE)


def compile_versions(target: Path, *options: str) -> None:
    """Write one lock file or constraints file from its source. Versions that need not change are kept."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    header = "--custom-compile-command=make lock"
    subprocess.run([*command, header, f"--output-file={target}", *options], cwd=ROOT, check=True)
    print(target)


def compile_lock(name: str, *options: str) -> None:
    target = REQUIREMENTS / f"{name}.lock"
    compile_versions(target, f"--constraint={CONSTRAINTS}", "--generate-hashes", "--no-annotate", *options)


def main(options: list[str]) -> None:
    # torch determines the version of Triton: see pyproject.toml.
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
