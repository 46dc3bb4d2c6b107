"""The programs of `bench/` that use internals of the services.

Each must run at its smallest size and print its last line.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "scheduler": ["--steps=2", "--rounds=1", "--max-sequences=32"],
    "front_end": ["--output-len=8", "--rounds=1"],
    "split": ["--num-seqs=2", "--output-len=8", "--rounds=1"],
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SMALLEST)
def test_it_measures(name: str, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", name, *SMALLEST[name], f"--output={output}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(output.read_text())
