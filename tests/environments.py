"""Python environments that contain Pagewire with some of its extras and nothing else.

By default the packages are linked from the current environment. With PAGEWIRE_TEST_VERSIONS=lowest or newest, pip
installs the packages from the package index, beside the built wheel, at that end of the version ranges in
pyproject.toml. `make test-lowest` runs the tests in this way.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pagewire import installation

ROOT = Path(__file__).parents[1]
VERSIONS = os.environ.get("PAGEWIRE_TEST_VERSIONS", "linked")
# The packages of the clone that an environment with linked packages uses.
_OWN = ("pagewire", "scheduler_service", "worker_service")
# Environment variables for pip: it reads no settings file, finds no wheel, and reaches no index.
NO_INDEX = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "0",
    "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
_UV = ROOT / ".venv-uv" / "bin" / "uv"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files_of_the_build() -> list[Path]:
    """Return the committed files that .dockerignore includes in the build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line.removeprefix("!") for line in lines if line[:1] == "!" and not line.endswith(".lock")}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    paths = [Path(name) for name in listed.stdout.decode().splitlines()]
    return [path for path in paths if any(path.is_relative_to(name) for name in seen) and (ROOT / path).exists()]


def constraints() -> dict[str, str]:
    """Return the versions in constraints.txt by canonical package name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE)
    assert len(dict(found)) == len(found), "each package has one version"
    return {canonicalize_name(name): version for name, version in found}


def requirements_of(*extras: str) -> list[Requirement]:
    """Return the requirements of the base package and the given extras.

    An extra that refers to other extras is replaced by the requirements of these extras.
    """
    named = project()["project"]
    waiting, found = [*named["dependencies"]], []
    for extra in extras:
        waiting += named["optional-dependencies"][extra]
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "pagewire":
            waiting += [line for extra in requirement.extras for line in named["optional-dependencies"][extra]]
        else:
            found.append(requirement)
    return found


def closure_of(requirements: Iterable[Requirement]) -> list[metadata.Distribution]:
    """Return the installed distributions that `requirements` need, directly or indirectly."""
    waiting, found = list(requirements), {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        distribution = metadata.distribution(requirement.name)
        found[name] = distribution
        waiting += map(Requirement, distribution.requires or [])
    return list(found.values())


class Environment:
    """A virtual environment with Pagewire and some of its extras."""

    def __init__(self, folder: Path, extras: tuple[str, ...], wheel: Path | None) -> None:
        """`wheel`: installed with the extras at the lowest or newest versions; with None, packages are linked."""
        venv.create(folder, with_pip=wheel is not None)
        self.python = folder / "bin" / "python"
        if wheel is None:
            (site_packages,) = folder.glob("lib/python*/site-packages")
            for name in _OWN:
                (site_packages / name).symlink_to(ROOT / name)
            link(metadata.distribution("pagewire"), site_packages)
            for distribution in closure_of(requirements_of(*extras)):
                link(distribution, site_packages)
        else:
            limits = _lowest(folder, extras) if VERSIONS == "lowest" else []
            self.run("-m", "pip", "install", "-q", *limits, f"{wheel}[{','.join(extras)}]" if extras else wheel)

    def run(self, *arguments: object, status: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run the environment's Python with `arguments` and check its exit status."""
        command = [self.python, *map(str, arguments)]
        done = subprocess.run(command, env=environ(), capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def versions(self) -> dict[str, str]:
        listed = self.run("-m", "pip", "freeze").stdout
        return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", listed, re.M)}


def environ() -> dict[str, str]:
    """Return the environment variables without PYTHONPATH, so that a process sees one environment only."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Link an installed distribution into another environment.

    A folder without `__init__.py` may be shared with other distributions, so its files are linked one by one.
    """
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or "__pycache__" in file.parts or file.suffix == ".pth" or not source.exists():
            continue
        top = Path(str(distribution.locate_file(file.parts[0])))
        is_own = top.suffix == ".dist-info" or (top / "__init__.py").exists()
        target = site_packages / (top.name if is_own else file)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(top if is_own else source)


def _lowest(folder: Path, extras: tuple[str, ...]) -> list[str]:
    """Return the pip options that select the lowest versions."""
    limits = folder / "lowest.txt"
    command = [_UV, "pip", "compile", "-q", "--resolution=lowest-direct", f"--python={sys.executable}"]
    command += [f"--output-file={limits}", "pyproject.toml", *(f"--extra={extra}" for extra in extras)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return ["-c", str(limits)]


def hide(package: installation.Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package look as if it were not installed."""
    version, is_there = installation._version, installation._is_there
    monkeypatch.setattr(installation, "_is_there", lambda module: module != package.module and is_there(module))
    monkeypatch.setattr(installation, "_version", lambda name: None if name == package.name else version(name))


def forgetting(*names: str) -> str:
    """Return the source of a sitecustomize.py that hides packages from `importlib.metadata`."""
    return f"""
from importlib import metadata

_known = metadata.version


def _version(name):
    if name in {names}:
        raise metadata.PackageNotFoundError(name)
    return _known(name)


metadata.version = _version
"""
