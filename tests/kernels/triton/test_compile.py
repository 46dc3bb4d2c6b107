"""Every kernel compiles for an H200, down to machine code; the compiler that Triton brings needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKS = Path(__file__).parent / "checks"
MODULES = sorted(path.stem for path in CHECKS.glob("*.py") if path.stem not in {"__init__", "case"})


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile(module, tmp_path):
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.triton.compilation", module]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" registers, ") >= 1, "no kernel was compiled"
