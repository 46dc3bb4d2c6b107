"""States of a clone whose environment is being set up.

The files that `make setup` reads are copied, and no package index is reachable.
"""

import shutil
from pathlib import Path

from tests.environments import NO_INDEX, Environment
from tests.first_hour.newcomer import NO_NETWORK, ROOT, Newcomer, Outcome
from tests.first_hour.state import LeftOutError, state

SETUP = "cd clone && make setup"
# pip's last message if everything before it succeeded.
NO_INDEX_WORDS = "no package index was reached that has setuptools>=77"
MAKE_FAILED = 2


def clone(newcomer: Newcomer) -> Path:
    folder = newcomer.home / "clone"
    (folder / "deploy").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "deploy/environment.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "protos" / "pagewire").mkdir(parents=True)
    newcomer.give(folder)
    return folder


@state("setup interrupted while pip comes", NO_INDEX_WORDS, code=MAKE_FAILED)
def interrupt_setup(newcomer: Newcomer) -> Outcome:
    python = clone(newcomer) / ".venv" / "bin" / "python"
    running = newcomer.start(SETUP, NO_INDEX)
    running.wait_until(python.exists)
    running.interrupt()
    running.end()
    return newcomer.run(SETUP, NO_INDEX)


@state("two setups at once", "waiting for another make", NO_INDEX_WORDS, code=MAKE_FAILED)
def setup_twice(newcomer: Newcomer) -> Outcome:
    clone(newcomer)
    first = newcomer.start(SETUP, NO_INDEX)
    first.wait_until(lambda: first.has_said("making .venv"))
    second = newcomer.start(SETUP, NO_INDEX)
    first.end()
    return second.end()


@state("PIP_USER=1", NO_INDEX_WORDS, code=MAKE_FAILED, never=("--user",))
def setup_for_the_user(newcomer: Newcomer) -> Outcome:
    clone(newcomer)
    return newcomer.run(SETUP, NO_INDEX | {"PIP_USER": "1"})


@state("setup without a network", "no package index was reached that has", code=MAKE_FAILED)
def setup_without_a_network(newcomer: Newcomer) -> Outcome:
    if not newcomer.can_unshare():
        raise LeftOutError("needs root, setpriv and unshare")
    clone(newcomer)
    # pip's default index, which pip retries with its default number of retries.
    settings = {name: value for name, value in NO_INDEX.items() if name not in ("PIP_INDEX_URL", "PIP_RETRIES")}
    return newcomer.run(SETUP, settings, timeout_s=150, within=NO_NETWORK)


@state("folder of a package lost", "torch is installed, but its files are gone", "--force-reinstall", code=78)
def lose_a_package(newcomer: Newcomer) -> Outcome:
    environment = Environment(newcomer.home / "environment", ("serve",), None)
    (lost,) = environment.python.parents[1].glob("lib/python*/site-packages/torch")
    lost.unlink()
    return newcomer.run(f"{environment.python} -m pagewire serve storyteller")
