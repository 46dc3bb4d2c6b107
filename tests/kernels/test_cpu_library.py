"""Errors for a library that does not load."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagewire.kernels.cpu import library
from testing.kernels.compiler import skip_without_compiler


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (0, "; remove it, and the next start builds it again"),
        (os.ST_NOEXEC, " is mounted noexec: mount it without that, or set PAGEWIRE_CACHE"),
    ],
)
def test_a_library_that_does_not_load(flags: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{library.choose_variant(library.NATIVE)}.so"
    path.write_bytes(b"no library")
    library.seal(path)
    monkeypatch.setattr(library, "BUILT", tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(library.BuildError) as caught:
        library.load_library(library.Build())
    assert str(caught.value).startswith(f"{path} does not load: ")
    assert remedy in str(caught.value)


def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's structures differ from the structures that Python fills in."""
    skip_without_compiler()
    shutil.copy(library.SOURCES / "abi.c", tmp_path)
    declared = (library.SOURCES / "abi.h").read_text()
    (tmp_path / "abi.h").write_text(declared.replace("} attention_step;", "  int64_t added;\n} attention_step;"))
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    with pytest.raises(
        library.BuildError, match="was built from another version: the sizes differ for attention_step; remove it"
    ):
        library.load_library(library.Build("portable", cache=tmp_path / "cache"))
