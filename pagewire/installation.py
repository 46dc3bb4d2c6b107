"""The required packages of Pagewire and its extras, and the commands that install missing ones.

This module imports none of these packages. `python -m pagewire.installation gpu` checks whether this Python can run the
GPU checks from a source tree.
"""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Without this index, pip installs torch with CUDA, 5 GB.
FOR_CPUS = " --extra-index-url INDEX  # the one for CPUs that the install page of PyTorch names"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
_TREE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that Pagewire needs: its PyPI name, the module that it provides, and the minimum version. A
    minimum of "" means any version."""

    name: str
    module: str
    least: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name


# The packages without which the base or an extra of pyproject.toml does not run, by the extra's name. The minimum
# versions of grpcio and protobuf are those required by the committed stubs.
_CLIENT = (
    Package("grpcio", "grpc", "1.76.0"),
    Package("protobuf", "google.protobuf", "6.31.1"),
    Package("Jinja2", "jinja2"),
)
_SCHEDULER = (
    Package("prometheus-client", "prometheus_client"),
    Package("xxhash", "xxhash"),
    Package("tokenizers", "tokenizers"),
    Package("llguidance", "llguidance"),
    Package("PyYAML", "yaml"),
)
_WORKER = (
    Package("torch", "torch", "2.11"),
    Package("safetensors", "safetensors"),
    Package("numpy", "numpy"),
    Package("regex", "regex"),
    Package("xxhash", "xxhash"),
    Package("PyYAML", "yaml"),
)
_SERVE = tuple(dict.fromkeys((*_WORKER, *_SCHEDULER)))
_TRANSFORMERS = Package("transformers", "transformers")
NEEDED = {
    "": _CLIENT,
    "scheduler": _SCHEDULER,
    "worker": _WORKER,
    "serve": _SERVE,
    "http": (
        Package("starlette", "starlette"),
        Package("uvicorn", "uvicorn"),
        Package("httptools", "httptools"),
        Package("msgspec", "msgspec"),
    ),
    "hub": (Package("huggingface_hub", "huggingface_hub", "1.31.0"),),
    "router": (Package("smg-grpc-proto", "smg_grpc_proto"),),
    "flash": (Package("flash-attn", "flash_attn"),),
    "bench": (Package("matplotlib", "matplotlib"), *_SCHEDULER[:1]),
    "tracing": (
        Package("opentelemetry-sdk", "opentelemetry.sdk"),
        Package("opentelemetry-exporter-otlp-proto-grpc", "opentelemetry.exporter.otlp.proto.grpc"),
    ),
    "transformers": (_TRANSFORMERS,),
    # Not an extra: the GPU checks, which run from a source tree.
    "gpu": (*_SERVE, Package("triton", "triton", "3.6"), _TRANSFORMERS),
}


def commit() -> str:
    """Return the abbreviated commit from which this Pagewire was installed or runs, or an empty text if it is unknown.
    In a clone with uncommitted changes, it ends with "-dirty"."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError, metadata.PackageNotFoundError):
        # A directory of packages may be in another project's repository.
        if (_TREE / ".git").exists() and 'name = "pagewire"' in (_TREE / "pyproject.toml").read_text():
            git = ["git", "-C", str(_TREE), "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty"]
            return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        origin = json.loads(metadata.distribution("pagewire").read_text("direct_url.json") or "{}")
        return str(origin.get("vcs_info", {}).get("commit_id", ""))[:7]
    return ""


def shortage(extra: str = "") -> str | None:
    """Return one line that names the missing or outdated Python packages of an extra, with a command to install them.
    Return None if no package is missing.

    The base packages of the client are always included in the check.
    """
    lacking = {package: phrase for package in (*_CLIENT, *NEEDED[extra]) if (phrase := _complaint(package))}
    if not lacking:
        return None
    return f"{', '.join(lacking.values())}: {command(extra, lacking)}"


def command(extra: str, lacking: Iterable[Package]) -> str:
    """Return the pip command that installs the packages of an extra of Pagewire.

    Pagewire itself is not on a package index. If pip does not know Pagewire, as in a source tree, the command installs
    the missing packages by name. If torch is missing, the command installs the extra from the source tree instead,
    because the extra pins the torch version. If the machine also has no GPU, the command uses the package index for
    CPUs.
    """
    found = {package.name: _version(package.name) for package in lacking if not _is_there(package.module)}
    lost = [f"{name}=={version.partition('+')[0]}" for name, version in found.items() if version is not None]
    needs_torch = extra != "gpu" and any(package.name == "torch" for package in lacking)
    wanted = " ".join(f"'{package}'" for package in lacking)
    if lost:  # pip believes that these are installed
        wanted = " ".join(("--force-reinstall --no-deps", *lost))
    elif extra != "gpu" and _version("pagewire"):
        wanted = f"'pagewire[{extra}]'" if extra else "pagewire"
    elif needs_torch and (_TREE / "pyproject.toml").exists():
        wanted = f"-e '{_TREE}[{extra}]'"
    index = FOR_CPUS if needs_torch and not _NVIDIA_DRIVER.exists() else ""
    return f"{sys.executable} -m pip install {wanted}{index}"


def advice(error: BaseException, extra: str = "") -> str | None:
    """Return one line with an installation command, if a missing or outdated Python package may have caused `error`.
    Return None if all packages are present.

    `extra` is the extra that the failed code needs. For a missing module, the line names the extra that provides the
    module. All packages are checked, because an outdated package can cause many kinds of errors, such as missing names
    or errors of the gRPC stubs.
    """
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        bringing = [name for name, packages in NEEDED.items() if module in {p.module.split(".")[0] for p in packages}]
        extra = extra if extra in bringing else next(iter(bringing), extra)
    return shortage(extra)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the Python packages that are missing for an extra or for the GPU checks.

    Return 0 if no package is missing, 1 if packages are missing, and 2 for wrong usage.
    """
    names = sys.argv[1:] if arguments is None else list(arguments)
    if len(names) != 1 or names[0] not in NEEDED:
        print(f"usage: python -m pagewire.installation {'|'.join(filter(None, NEEDED))}", file=sys.stderr)
        return 2
    line = shortage(names[0])
    if line:
        print(f"pagewire: error: {line}", file=sys.stderr)
    return 1 if line else 0


def _version(name: str) -> str | None:
    """Return the installed version of a Python package, or None if pip does not know the package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _complaint(package: Package) -> str | None:
    version = _version(package.name)
    if not _is_there(package.module):
        return f"{package.name} is {'not installed' if version is None else 'installed, but its files are gone'}"
    if version is not None and _numbers(version) < _numbers(package.least):
        return f"{package.name} {version} is too old (at least {package.least})"
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # The parent package is missing.


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a package version, such as (2, 11, 0) for 2.11.0rc1+cu130."""
    begin = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()


if __name__ == "__main__":
    sys.exit(main())
