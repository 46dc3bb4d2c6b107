"""Compilation of the simulator and the code under test with mypyc.

The same sources give the same histories, twice as fast. The compiled modules are stored in `build/sim`, in a folder
named by a hash of all inputs, beside a copy of the sources. They pay off in long campaigns: compiling takes as long as
the interpreter needs for about ten thousand seeds.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.sim.campaign import CAMPAIGN

ROOT = Path(__file__).parents[2]
_PACKAGES = ("scheduler_service/core", "tests/sim")
_MODULES = (
    "pagewire/common/__init__.py",
    "pagewire/common/wire/__init__.py",
    "pagewire/common/wire/messages.py",
    "pagewire/common/option_limits.py",
    "scheduler_service/__init__.py",
    "scheduler_service/serving/__init__.py",
    "scheduler_service/serving/active_request.py",
    "scheduler_service/serving/availability.py",
    "scheduler_service/serving/clock.py",
    "scheduler_service/serving/kv_events.py",
    "scheduler_service/serving/observer.py",
    "scheduler_service/serving/output.py",
    "scheduler_service/serving/refusal.py",
    "scheduler_service/serving/step_loop.py",
    "scheduler_service/simulation/__init__.py",
    "scheduler_service/simulation/timeline.py",
    "worker_service/__init__.py",
    "worker_service/rpc/__init__.py",
    "worker_service/rpc/session.py",
    "tests/__init__.py",
    "testing/__init__.py",
    "testing/core/__init__.py",
    "testing/core/beam_oracle.py",
    "testing/core/simulated_states.py",
    "testing/core/simulated_worker.py",
    "testing/core/toy_grammar.py",
)
_UNUSED = frozenset(("known_seeds.py", "mutants.py", "outputs", "planting.py", "test_simulator.py"))
# Modules that stay interpreted. mypyc does not support asynchronous generators. It compiles an enumeration whose
# members have several values each, as in refusal.py, to a different class.
_INTERPRETED = (
    "__init__.py",
    "__main__.py",
    "active_request.py",
    "campaign.py",
    "compiled.py",
    "option_limits.py",
    "refusal.py",
    "scheduler_options.py",
    "seeds.py",
)
_NUM_COMPARED_SEEDS = 50


class CompilationError(Exception):
    """mypyc or the C compiler failed, or the compiled simulator behaves differently; the message says how."""


def sources() -> list[Path]:
    """Return the paths of all sources that a simulation imports from this project, relative to the root."""
    found = [path.relative_to(ROOT) for package in _PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted([*map(Path, _MODULES), *(path for path in found if _UNUSED.isdisjoint(path.parts))])


def build() -> Path:
    """Return the folder of the compiled simulator, and compile it if it does not exist. Raises CompilationError."""
    digest = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    for path in sources():
        digest.update(f"{path}\0".encode() + (ROOT / path).read_bytes())
    target = ROOT / "build" / "sim" / digest.hexdigest()[:16]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name) / "sources"
        for path in sources():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
        (folder / "pagewire" / "__init__.py").touch()  # the package itself is the client
        print("compiling the simulator, which takes one or two minutes, once", flush=True)
        _compile(folder)
        os.rename(folder, target)
    return target


def _compile(folder: Path) -> None:
    modules = [str(path) for path in sources() if path.name not in _INTERPRETED]
    command = [sys.executable, "-m", "mypyc", *modules]
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError((done.stdout + done.stderr)[-4000:])
    shutil.rmtree(folder / "build")


def run_compiled(arguments: list[str]) -> int:
    """Run `python -m tests.sim` in the compiled folder with these arguments, and return its exit status.

    First the histories of a few seeds are compared with the interpreter's histories. Raises CompilationError if they
    differ.
    """
    folder = build()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    program = (
        f"from tests.sim.campaign import CAMPAIGN; print(CAMPAIGN.run_seeds(range({_NUM_COMPARED_SEEDS})).log_hash)"
    )
    command = [sys.executable, "-c", program]
    compiled = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    interpreted = CAMPAIGN.run_seeds(range(_NUM_COMPARED_SEEDS)).log_hash
    if int(compiled.stdout) != interpreted:
        raise CompilationError(f"the first {_NUM_COMPARED_SEEDS} seeds have other histories when compiled")
    return subprocess.run([sys.executable, "-m", "tests.sim", *arguments], cwd=folder, env=environment).returncode
