"""Names the packages that Pagewire needs, and tells whoever lacks one how to install it. It imports none of them.

`python -m pagewire.installation gpu` says whether this Python can run the checks for GPUs from a source tree.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Package:
    """A package by its name on PyPI, the module it is imported as, and the oldest version that works, "" for any."""

    name: str
    module: str
    least: str = ""

    def __str__(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name


# The least versions of grpcio and protobuf are those that the committed stubs load with.
BASE = (
    Package("grpcio", "grpc", "1.76.0"),
    Package("protobuf", "google.protobuf", "6.31.1"),
    Package("prometheus-client", "prometheus_client"),
    Package("xxhash", "xxhash"),
    Package("tokenizers", "tokenizers"),
    Package("PyYAML", "yaml"),
    Package("Jinja2", "jinja2"),
)
WORKER = (
    Package("torch", "torch", "2.11"),
    Package("safetensors", "safetensors"),
    Package("numpy", "numpy"),
    Package("regex", "regex"),
)
GPU_CHECKS = (*BASE, *WORKER, Package("triton", "triton", "3.6"), Package("transformers", "transformers"))
# Modules that only an extra of pyproject.toml installs, by its name.
EXTRAS = {
    "flash_attn": "flash",
    "matplotlib": "bench",
    "opentelemetry": "tracing",
    "smg": "gateway",
    "transformers": "transformers",
}
SETS = {"base": BASE, "worker": (*BASE, *WORKER), "gpu": GPU_CHECKS}


def lacking(packages: Iterable[Package]) -> list[str]:
    """Returns a phrase for each of these packages that is missing or too old."""
    return [phrase for package in packages if (phrase := _complaint(package))]


def shortage(packages: Sequence[Package]) -> str | None:
    """Returns a line on what to install, or None if nothing is lacking."""
    phrases = lacking(packages)
    return _line(phrases, packages) if phrases else None


def extra_shortage(module: str) -> str | None:
    """Returns a line that says how to install what only an extra brings, or None if it is there."""
    return None if _is_there(module) else f"{module} is not installed: pip install 'pagewire[{EXTRAS[module]}]'"


def advice(error: BaseException) -> str | None:
    """Returns a line on what to install if an error comes of a missing or old package, else None.

    Packages of the base that are too old fail in many ways: a name that is not there yet, or the stubs' own errors. A
    missing module counts if it is one that Pagewire needs.
    """
    found = list(BASE)
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module in EXTRAS and (line := extra_shortage(module)):
            return line
        found += [package for package in WORKER if package.module == error.name]
    return shortage(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the packages that are lacking for one of the sets. Returns 1 if there are some."""
    names = sys.argv[1:] if arguments is None else list(arguments)
    if len(names) != 1 or names[0] not in SETS:
        print(f"usage: python -m pagewire.installation {'|'.join(SETS)}", file=sys.stderr)
        return 2
    line = shortage(SETS[names[0]])
    if line:
        print(f"pagewire: error: {line}", file=sys.stderr)
    return 1 if line else 0


def _line(phrases: Sequence[str], packages: Iterable[Package]) -> str:
    wanted = " ".join(f"'{package}'" for package in packages if _complaint(package))
    return f"{', '.join(phrases)}: {sys.executable} -m pip install {wanted}"


def _complaint(package: Package) -> str | None:
    if not _is_there(package.module):
        return f"{package.name} is not installed"
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return None  # Unpacked somewhere on the path: its version is not known.
    if _numbers(version) < _numbers(package.least):
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
