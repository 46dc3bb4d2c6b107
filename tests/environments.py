"""Python environments that hold Pagewire with some of its extras and nothing else.

Their packages are those of this environment, linked. With PAGEWIRE_TEST_VERSIONS=lowest or newest they are installed
from the package index instead, beside the built wheel, at that end of the ranges of pyproject.toml. `make test-lowest`
does so.
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
# What of a clone runs in an environment whose packages are linked.
_OWN = ("pagewire", "scheduler_service", "worker_service")
# For pip: reads no file of pip's settings, finds no wheel, and reaches no index.
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
    """Returns the committed files that .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line.removeprefix("!") for line in lines if line[:1] == "!" and not line.endswith(".lock")}
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    paths = [Path(name) for name in listed.stdout.decode().splitlines()]
    return [path for path in paths if any(path.is_relative_to(name) for name in seen) and (ROOT / path).exists()]


def constraints() -> dict[str, str]:
    """Returns the versions of constraints.txt by the packages' canonical names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = re.findall(r"^([\w.-]+)==(\S+)", "\n".join(lines), re.MULTILINE)
    assert len(dict(found)) == len(found), "each package has one version"
    return {canonicalize_name(name): version for name, version in found}


def requirements_of(*extras: str) -> list[Requirement]:
    """Returns what the base and some extras name, without the extras that an extra is made of."""
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
    """Returns the distributions that installing these would bring, as they are installed here."""
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
    """An environment with some extras."""

    def __init__(self, folder: Path, extras: tuple[str, ...], wheel: Path | None) -> None:
        """`wheel` is installed with its extras, at the lowest or newest versions, if it is given."""
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
        """Runs its Python to the end, which is to be of this status."""
        command = [self.python, *map(str, arguments)]
        done = subprocess.run(command, env=environ(), capture_output=True, text=True, cwd="/", check=False)
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def versions(self) -> dict[str, str]:
        listed = self.run("-m", "pip", "freeze").stdout
        return {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", listed, re.M)}


def environ() -> dict[str, str]:
    """Returns the variables for processes that see one environment alone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Puts a distribution that is installed here into another environment. A folder that it may share with others, as
    it is no package, is made anew with its files."""
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
    """Returns the flags that hold pip to the lowest versions."""
    limits = folder / "lowest.txt"
    command = [_UV, "pip", "compile", "-q", "--resolution=lowest-direct", f"--python={sys.executable}"]
    command += [f"--output-file={limits}", "pyproject.toml", *(f"--extra={extra}" for extra in extras)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return ["-c", str(limits)]


def hide(package: installation.Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it look as if a package were not installed."""
    version, is_there = installation._version, installation._is_there
    monkeypatch.setattr(installation, "_is_there", lambda module: module != package.module and is_there(module))
    monkeypatch.setattr(installation, "_version", lambda name: None if name == package.name else version(name))


def forgetting(*names: str) -> str:
    """Returns lines for a sitecustomize.py that make packages unknown to pip."""
    return f"""
from importlib import metadata

_known = metadata.version


def _version(name):
    if name in {names}:
        raise metadata.PackageNotFoundError(name)
    return _known(name)


metadata.version = _version
"""
