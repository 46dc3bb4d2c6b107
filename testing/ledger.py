"""A ledger of GPU measurements: the results of each part, and whether they are older than the code.

The files `gpu_COMMAND.CARD.json` contain the results, one file for each command and card. Each part in a file records
the commit and a digest of the source files that it measures. A part is stale if the digest has changed. Importing this
module does not import torch.
"""

import ast
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from testing.record import RESULTS

ROOT = Path(__file__).parents[1]
COMMIT_VARIABLE = "PAGEWIRE_COMMIT"  # the commit, for a copy of the tree without its history
# The modules that a part measures, together with all modules that they import directly or indirectly.
_RUNNER = ("worker_service.startup.loader",)
_SERVICES = ("scheduler_service.server", "worker_service.server", "pagewire.client.client")
_ENTRIES: dict[str, tuple[str, ...]] = {
    "device": (),
    **dict.fromkeys(("decode_small", "decode_large", "swap", "step_tables_small", "step_tables_large"), _RUNNER),
    **dict.fromkeys(("first_token_small", "first_token_large", "peer_steps_small", "peer_steps_large"), _RUNNER),
    "bench.gpu.products": ("pagewire.kernels.triton.linear", "pagewire.kernels.triton.scaled"),
}
# Source that no measurement on a GPU depends on.
_OTHERS = (
    "worker_service/host/",
    "kernels/cpu/",
    "testing/checkpoints/",
    "pagewire/common/gguf/",
    "pagewire/common/grammars/",
)
Part = Mapping[str, Any]


class State(IntEnum):
    """The state of a part, in the order in which parts are run. A current part is not run."""

    STARTED = 0
    NEVER = 1
    STALE = 2
    FAILED = 3
    CURRENT = 4


def state(part: Part | None, digest: str) -> State:
    """Return the state of a part, given its entry in the ledger and the digest of today's source."""
    if part is None:
        return State.NEVER
    if part.get("digest") != digest:
        return State.STALE
    if not part.get("is_complete", True):
        return State.STARTED
    return State.FAILED if any("error" in result for result in part["results"]) else State.CURRENT


def path_of(command: str, card: str, folder: Path = RESULTS) -> Path:
    """Return the file of a command's results on a card, such as `gpu_speed.h200.json`."""
    name = re.sub(r"\W+", "_", card.removeprefix("NVIDIA ")).lower()
    return folder / f"gpu_{command}.{name}.json"


def parts_of(path: Path) -> dict[str, Part]:
    """Return the parts in a file by their names, or an empty dict if the file does not exist."""
    return json.loads(path.read_text())["parts"] if path.exists() else {}


def commit() -> str | None:
    """Return the commit of the source, with a `+` if tracked files differ from it, or None if it is unknown."""
    if os.environ.get(COMMIT_VARIABLE):
        return os.environ[COMMIT_VARIABLE]
    head, changes = (
        subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        for arguments in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno", ":!bench/results"))
    )
    return head.stdout.strip() + "+" * bool(changes.stdout.strip()) if head.returncode == 0 else None


def digest_of(part: str) -> str:
    """Return a digest of the source files that a part measures: 12 hexadecimal digits."""
    entries = (part,) if part.startswith("testing.") else _ENTRIES.get(part, _SERVICES)
    return _digest(sources(entries))


@cache
def sources(entries: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files of these modules, and of all modules of this repository that they import."""
    missing, found = list(entries), set[Path]()
    while missing:
        path = _file_of(missing.pop())
        if path is not None and path not in found:
            found.add(path)
            missing += _imports(path)
    return tuple(sorted(found))


@cache
def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0".encode() + (ROOT / path).read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _file_of(module: str) -> Path | None:
    """Return the file of a module of this repository, as its path from the root, or None for any other module."""
    stem = ROOT / module.replace(".", "/")
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.exists():
            found = path.resolve().relative_to(ROOT)  # `pagewire/kernels` is a link
            return None if str(found).startswith(_OTHERS) else found
    return None


@cache
def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
