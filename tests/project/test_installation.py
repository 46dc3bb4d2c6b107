"""Tests of an installed Pagewire: its top-level names, coexistence with a package `kernels`, and errors about missing
packages."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from deploy.platform_wheel import PLACE, platform_wheel, variants_of
from pagewire import LLM, installation
from pagewire.common.process.child_process import EXIT_REFUSED
from testing.kernels.compiler import skip_without_compiler
from testing.sources import imports, parse, sources
from tests.environments import files_of_the_build, forgetting, hide, project, requirements_of

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
OPTIONAL = project()["project"]["optional-dependencies"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
# A module of the kernels that does not import torch, whose import takes a second.
KERNELS = "pagewire.kernels.cpu.compiler"
OURS = f"import {KERNELS}, pagewire.protos.gen.pagewire.worker.v1.worker_pb2, scheduler_service.server"
THEIRS = "import kernels; assert kernels.__version__ == '0.17.2'; import kernels.layer"
# A folder `kernels` on the path, such as the repository's, is a namespace package without a file.
ABSENT = "import importlib.util; assert getattr(importlib.util.find_spec('kernels'), 'origin', None) is None"


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that a build reads, so that the build does not write to the repository."""
    folder = tmp_path_factory.mktemp("source")
    for path in files_of_the_build():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", *OFFLINE, "--wheel-dir", str(folder), str(source))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def other_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the name and top-level package of PyPI's `kernels`, without its many dependencies."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "kernels" / "layer").mkdir(parents=True)
    (folder / "kernels" / "__init__.py").write_text("__version__ = '0.17.2'\n")
    (folder / "kernels" / "layer" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "kernels"\nversion = "0.17.2"\n[tool.setuptools]\npackages = ["kernels", "kernels.layer"]\n'
    )
    pip("wheel", *OFFLINE, "--wheel-dir", str(folder), str(folder))
    (path,) = folder.glob("*.whl")
    return path


class Environment:
    """A virtual environment with this environment's packages except Pagewire, which a test installs, editable or
    not."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        (site_packages,) = folder.glob("lib/python*/site-packages")
        # Python does not read .pth files in a folder that is itself named in a .pth file. So the repository's editable
        # install is invisible.
        shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site_packages / "shared.pth").write_text("\n".join(shared) + "\n")

    def pip(self, *arguments: str) -> None:
        pip("--python", str(self.python), *arguments)

    def install(self, *arguments: str) -> None:
        """Install a package. Its modules are compiled only when they are imported, because few are."""
        self.pip("install", "--no-compile", *OFFLINE, *arguments)

    def run(self, program: str, path: str = "", folder: Path = Path("/")) -> None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": path}
        command = [str(self.python), "-c", program]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_owns_no_other_names(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names_in(wheel)} == {"pagewire", "scheduler_service", "worker_service"}


def test_wheel_holds_sources_protos_and_types(wheel: Path) -> None:
    names = names_in(wheel)
    assert "pagewire/protos/pagewire/scheduler/v1/scheduler.proto" in names
    assert "pagewire/protos/pagewire/worker/v1/worker.proto" in names
    sources = {f"pagewire/kernels/cpu/source/{path.name}" for path in (ROOT / "kernels/cpu/source").iterdir()}
    assert sources - names == set()
    assert {name for name in names if name.endswith((".pyc", ".so", "/__pycache__"))} == set()


def test_a_platforms_wheel_needs_no_compiler(wheel: Path, environment: Environment) -> None:
    skip_without_compiler()
    made = platform_wheel(wheel)
    assert names_in(made) - names_in(wheel) == {f"{PLACE}/{name}.so" for name in variants_of(platform.machine())}
    assert wheel.exists()
    environment.install(str(made))
    environment.run(
        "import os; os.environ.update(CC='no-such-compiler', PAGEWIRE_CACHE='/no/such/folder')\n"
        "from pagewire.kernels.cpu import Build, BuildError, CpuKernels, VARIANTS, load_library\n"
        "for variant in VARIANTS:\n"
        "    try:\n"
        "        assert CpuKernels(load_library(Build(variant))).variant == variant\n"
        "    except BuildError as error:\n"
        "        assert 'this processor does not run' in str(error), error\n"
        "assert CpuKernels(load_library(Build())).variant\n"
    )


def test_wheel_from_the_source_archive_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    program = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        assert not [member.name for member in packed if member.issym() and member.linkname.startswith("/")]
    pip("wheel", *OFFLINE, "--wheel-dir", str(tmp_path), str(archive))
    (again,) = tmp_path.glob("*.whl")
    assert names_in(again) == names_in(wheel)


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_package_kernels_may_come_and_go(
    order: str, wheel: Path, other_wheel: Path, environment: Environment
) -> None:
    for path in (other_wheel, wheel) if order == "before" else (wheel, other_wheel):
        environment.install(str(path))
    environment.run(f"{OURS}\n{THEIRS}")
    environment.pip("uninstall", "-q", "-y", "kernels")
    environment.run(f"{OURS}\n{ABSENT}")
    environment.install(str(other_wheel))
    environment.pip("uninstall", "-q", "-y", "pagewire")
    environment.run(THEIRS)


def test_editable_install_leaves_the_name_to_others(source: Path, other_wheel: Path, environment: Environment) -> None:
    environment.install("-e", str(source))
    environment.run(f"{OURS}\n{ABSENT}")
    environment.install(str(other_wheel))
    environment.run(f"{OURS}\n{THEIRS}")


@pytest.mark.parametrize("is_editable", [False, True], ids=["wheel", "editable"])
def test_an_installed_package_wins_over_a_clone_of_its_name(
    is_editable: bool, source: Path, wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    clone = tmp_path / "pagewire"
    shutil.copytree(source, clone, symlinks=True)
    environment.install(*(["-e", str(clone)] if is_editable else [str(wheel)]))
    program = "import pagewire, pagewire.kernels.sampling; pagewire.LLM, pagewire.__version__"
    environment.run(f"{program}\n{OURS}", folder=tmp_path)


def test_source_tree_on_the_path_leaves_the_name_to_others(other_wheel: Path, environment: Environment) -> None:
    environment.run(f"{OURS}\n{ABSENT}", path=str(ROOT))
    environment.install(str(other_wheel))
    environment.run(f"{OURS}\n{THEIRS}", path=str(ROOT))


def test_least_versions_are_those_of_the_stubs() -> None:
    least = {package.name: package.least for package in installation.NEEDED[""] if package.least}
    stubs = list((ROOT / "pagewire" / "protos" / "gen").rglob("*_pb2*.py"))
    grpcio = {found for path in stubs for found in re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", path.read_text())}
    protobuf = {found for path in stubs for found in re.findall(r"# Protobuf Python Version: (.*)", path.read_text())}
    assert (grpcio, protobuf) == ({least["grpcio"]}, {least["protobuf"]})


def third_party(path: Path) -> set[str]:
    """Return the third-party packages that a module of the product imports."""
    names = {name.split(".")[0] for name in imports(parse(path))}
    return names - sys.stdlib_module_names - {"pagewire", "scheduler_service", "worker_service"}


# Modules whose names differ from their packages' names.
MODULES = {
    "flash-attn": "flash_attn",
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "protobuf": "google",
    "PyYAML": "yaml",
}


def brought_by(*extras: str) -> set[str]:
    names = [requirement.name for requirement in requirements_of(*extras)]
    return {MODULES.get(name, name.lower().replace("-", "_")) for name in names}


@pytest.mark.parametrize(
    ("packages", "extras"),
    [
        (("pagewire",), ("serve", "bench", "transformers", "tracing")),
        (("scheduler_service", "pagewire/common", "pagewire/network"), ("scheduler", "router", "tracing")),
        (("worker_service", "kernels", "pagewire/common", "pagewire/network"), ("worker", "tracing", "flash")),
    ],
)
def test_what_a_part_imports_comes_with_its_extras(packages: tuple[str, ...], extras: tuple[str, ...]) -> None:
    imported = set(chain.from_iterable(map(third_party, sources(*packages))))
    # torch requires Triton.
    assert imported - {"triton"} <= brought_by(*extras)


def test_an_extra_brings_nothing_that_is_not_imported() -> None:
    imported = set(chain.from_iterable(map(third_party, sources("pagewire", "scheduler_service", "worker_service"))))
    imported |= set(chain.from_iterable(map(third_party, sources("kernels"))))
    assert brought_by(*set(OPTIONAL) - {"test", "dev"}) <= imported


def test_an_extra_brings_what_errors_name_by_it() -> None:
    assert set(installation.NEEDED) == {"", "gpu", *OPTIONAL} - {"test", "dev"}
    for extra, packages in installation.NEEDED.items():
        if extra != "gpu":
            brought = {requirement.name for requirement in requirements_of(*filter(None, [extra]))}
            assert {package.name for package in packages} <= brought


def test_files_that_are_gone_are_told_with_what_brings_them_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip considers a package installed if its RECORD exists, and would not reinstall it."""
    monkeypatch.setattr(installation, "_is_there", lambda name: name != "torch")
    monkeypatch.setattr(installation, "_version", lambda name: "2.99.0+cpu" if name == "torch" else "99")
    command = f"{sys.executable} -m pip install --force-reinstall --no-deps torch==2.99.0{installation.FOR_CPUS}"
    monkeypatch.setattr(installation, "_NVIDIA_DRIVER", tmp_path / "none")
    assert installation.shortage("worker") == f"torch is installed, but its files are gone: {command}"


@pytest.mark.parametrize("extra", sorted(OPTIONAL.keys() - {"test", "dev"}))
def test_what_an_extra_brings_is_named_with_it(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = installation.NEEDED[extra][0]
    hide(package, monkeypatch)
    line = str(installation.shortage(extra))
    assert line.startswith(f"{package.name} is not installed")
    assert line.partition(" --extra")[0].endswith(f": {sys.executable} -m pip install 'pagewire[{extra}]'")
    assert installation.advice(ModuleNotFoundError("no", name=f"{package.module}.part"), extra) == line
    # pip does not know about a source tree on the path. The command must not choose a build of torch.
    monkeypatch.setattr(installation, "_version", lambda name: None)
    wanted = f"-e '{ROOT}[{extra}]'" if package.name == "torch" else f"'{package}'"
    assert f"-m pip install {wanted}" in str(installation.shortage(extra))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torch_comes_without_cuda_where_no_gpu_is(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (torch,) = [package for package in installation.NEEDED["worker"] if package.name == "torch"]
    hide(torch, monkeypatch)
    monkeypatch.setattr(installation, "_NVIDIA_DRIVER", tmp_path if has_gpu else tmp_path / "none")
    index = "" if has_gpu else installation.FOR_CPUS
    line = str(installation.shortage("serve"))
    assert line.endswith(f": {sys.executable} -m pip install 'pagewire[serve]'{index}")
    assert "--extra-index-url" not in str(installation.shortage("router"))


def test_a_tokenizer_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = object.__new__(LLM)
    llm.model = str(ROOT / "models" / "storyteller")
    assert llm.get_tokenizer().decode([388])
    (transformers,) = installation.NEEDED["transformers"]
    hide(transformers, monkeypatch)
    with pytest.raises(ImportError, match=r"^get_tokenizer needs transformers, but .* 'pagewire\[transformers\]'$"):
        llm.get_tokenizer()


def test_packages_of_a_bare_machine_may_be_no_newer_than_the_ranges() -> None:
    """The checked minimum of each package is not above the lower end of its range in pyproject.toml."""
    specifiers = {requirement.name: requirement.specifier for requirement in requirements_of("dev", "flash")}
    for package in {package for packages in installation.NEEDED.values() for package in packages}:
        (least,) = (part.version for part in specifiers[package.name] if part.operator in (">=", "=="))
        assert installation._numbers(least) >= installation._numbers(package.least), package


# Python imports a module of this name automatically. It makes packages look older or absent.
SITECUSTOMIZE = """
import sys
from importlib import metadata

found = metadata.version
metadata.version = lambda name: {versions}.get(name) or found(name)
sys.modules.update(dict.fromkeys({absent}))
import grpc
grpc.__version__ = {versions}.get("grpcio", grpc.__version__)
from google.protobuf import runtime_version
if "protobuf" in {versions}:
    runtime_version.OSS_MAJOR = runtime_version.MAJOR = 5
"""


@pytest.mark.parametrize(
    ("versions", "absent", "expected"),
    [
        ({"grpcio": "1.60.0"}, [], "grpcio 1.60.0 is too old (at least 1.76.0)"),
        ({"protobuf": "5.29.0"}, [], "protobuf 5.29.0 is too old (at least 6.31.1)"),
        ({}, ["xxhash"], "xxhash is not installed"),
        ({}, ["prometheus_client"], "prometheus-client is not installed"),
    ],
    ids=["old grpcio", "old protobuf", "no xxhash", "no prometheus-client"],
)
def test_what_is_lacking_is_one_line(
    versions: dict[str, str], absent: list[str], expected: str, tmp_path: Path
) -> None:
    """The line is printed by a command, and by a program that imports the client if the client lacks the package."""
    forgotten = forgetting(*(name.replace("_", "-") for name in absent))
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(versions=versions, absent=absent) + forgotten)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    flags = ["--model", str(ROOT / "models" / "storyteller"), "--worker", "127.0.0.1:1", "--log-level", "warning"]
    command = [sys.executable, "-m", "pagewire", "scheduler", *flags]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_REFUSED
    (line,) = ended.stderr.splitlines()
    assert expected in line
    assert "-m pip install '" in line
    program = [sys.executable, "-c", "from pagewire import Client"]
    ended = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=False)
    lines = ended.stderr.splitlines()
    # The client needs neither of the absent packages. The traceback of Pagewire's own error is the only traceback.
    assert [line for line in lines if line.startswith(f"ImportError: {expected}")] == (lines[-1:] if not absent else [])
    assert ended.stderr.count("Traceback") == len(lines[-1:])


def test_check_for_gpus_names_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installation.main(["gpu"]) == 0
    monkeypatch.setattr(installation.metadata, "version", lambda name: "2.3.0" if name == "torch" else "99")
    assert installation.main(["gpu"]) == 1
    assert "torch 2.3.0 is too old (at least 2.11)" in capsys.readouterr().err
    assert installation.main(["everything"]) == 2
