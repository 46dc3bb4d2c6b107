"""A user cache for one test."""

from pathlib import Path

import pytest

from testing.kernels.compiler import skip_without_compiler
from worker_service.startup.cpu_kernels import cache_folder, load_cpu_kernels


def use_own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `folder`, which is created, as the user cache, with the built kernels, which are required."""
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    load_cpu_kernels()
    built = cache_folder("kernels")
    assert built is not None
    folder.mkdir()
    (folder / "kernels").symlink_to(built)
    monkeypatch.setenv("PAGEWIRE_CACHE", str(folder))
