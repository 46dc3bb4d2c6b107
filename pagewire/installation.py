"""Names the packages that Pagewire and its extras need, and how to install what is lacking. It imports none of them.

`python -m pagewire.installation gpu` says whether this Python can run the checks for GPUs from a source tree.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Else torch comes with CUDA, 5 GB.
FOR_CPUS = " --extra-index-url INDEX  # the one for CPUs that the install page of PyTorch names"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
_TREE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Package:
    """A package by its name on PyPI, the module it is imported as, and the oldest version that works, "" for any."""

    name: str
    module: str
    least: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name


# Without these the base, or what an extra of pyproject.toml is for, does not run at all, by the extra's name. The least
# versions of grpcio and protobuf are those that the committed stubs load with.
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
    # No extra: the checks for GPUs, which run from a source tree.
    "gpu": (*_SERVE, Package("triton", "triton", "3.6"), _TRANSFORMERS),
}


def shortage(extra: str = "") -> str | None:
    """Returns a line on what the base and an extra lack, with the command that installs it, or None for nothing."""
    lacking = {package: phrase for package in (*_CLIENT, *NEEDED[extra]) if (phrase := _complaint(package))}
    if not lacking:
        return None
    return f"{', '.join(lacking.values())}: {command(extra, lacking)}"


def command(extra: str, lacking: Iterable[Package]) -> str:
    """Returns the command that installs an extra. Pagewire is on no package index: where pip does not know it, as in a
    source tree that is not installed, the command installs the packages that are lacking. For torch it installs the
    extra, which says which torch, and where no GPU is, one without CUDA."""
    found = {package.name: _version(package.name) for package in lacking if not _is_there(package.module)}
    lost = [f"{name}=={version.partition('+')[0]}" for name, version in found.items() if version is not None]
    needs_torch = extra != "gpu" and any(package.name == "torch" for package in lacking)
    wanted = " ".join(f"'{package}'" for package in lacking)
    if lost:  # which pip takes to be there
        wanted = " ".join(("--force-reinstall --no-deps", *lost))
    elif extra != "gpu" and _version("pagewire"):
        wanted = f"'pagewire[{extra}]'" if extra else "pagewire"
    elif needs_torch and (_TREE / "pyproject.toml").exists():
        wanted = f"-e '{_TREE}[{extra}]'"
    index = FOR_CPUS if needs_torch and not _NVIDIA_DRIVER.exists() else ""
    return f"{sys.executable} -m pip install {wanted}{index}"


def advice(error: BaseException, extra: str = "") -> str | None:
    """Returns a line on what to install if the error comes of a missing or old package, else None. `extra` is what the
    code that failed needs.

    Packages that are too old fail in many ways: a name that is not there yet, or the stubs' own errors. A missing
    module is told by the extra that brings it.
    """
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        bringing = [name for name, packages in NEEDED.items() if module in {p.module.split(".")[0] for p in packages}]
        extra = extra if extra in bringing else next(iter(bringing), extra)
    return shortage(extra)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what is lacking for an extra, or for the checks for GPUs. Returns 1 if something is."""
    names = sys.argv[1:] if arguments is None else list(arguments)
    if len(names) != 1 or names[0] not in NEEDED:
        print(f"usage: python -m pagewire.installation {'|'.join(filter(None, NEEDED))}", file=sys.stderr)
        return 2
    line = shortage(names[0])
    if line:
        print(f"pagewire: error: {line}", file=sys.stderr)
    return 1 if line else 0


def _version(name: str) -> str | None:
    """Returns None for what pip does not know, as it is unpacked somewhere on the path."""
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
        return False  # The package around it is missing.


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with: (2, 11, 0) for 2.11.0rc1+cu130."""
    begin = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()


if __name__ == "__main__":
    sys.exit(main())
