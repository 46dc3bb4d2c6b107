"""The documents of the repository."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
DOCUMENTS = sorted(Path(name) for name in TRACKED if name.endswith(".md"))


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
