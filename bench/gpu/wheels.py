"""Downloads the wheels that an offline GPU machine lacks, and lists them with their sizes.

    python -m bench wheels [--python 3.12] [--folder dist/gpu-wheels]

The machine must already have torch with CUDA, Triton and transformers, with their dependencies. Install the wheels
there with `python3 -m pip install --no-index --no-deps --target SITE gpu-wheels/*.whl`.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import parser_of
from pagewire.installation import NEEDED

THERE = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "regex", "PyYAML", "Jinja2"}
LACKING = sorted({package.name for extra in ("", "gpu") for package in NEEDED[extra]} - THERE)
PLATFORMS = (
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)),
    "--platform=manylinux2014_x86_64",
)


def main(flags: Sequence[str]) -> int:
    """Download the wheels in the versions of constraints.txt, and print them. Return pip's exit status."""
    parser = parser_of("wheels", __doc__)
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="Python version of the GPU machine (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("dist/gpu-wheels"), help="default: %(default)s")
    options = parser.parse_args(flags)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *PLATFORMS]
    command += ["--implementation=cp", f"--python-version={options.python}", "-c", "constraints.txt"]
    if status := subprocess.run([*command, "-d", str(options.folder), *LACKING], check=False).returncode:
        return status
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in sorted(options.folder.glob("*.whl"))}
    print("\n".join(f"{size:8.1f} MiB  {name}" for name, size in sizes.items()))
    print(f"{sum(sizes.values()):8.1f} MiB  in {options.folder}")
    return 0
