"""Errors for a library that does not load."""

import os
import platform
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagewire.kernels.cpu import compiler as compiler_module
from pagewire.kernels.cpu import library
from pagewire.kernels.cpu.compiler import find_compilers
from testing.kernels.compiler import first_compiler, skip_without_compiler


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


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="variants for x86_64")
def test_a_compiler_older_than_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that does not know AMX builds the variant without it, and only if the widest was asked for."""
    skip_without_compiler()
    command = shlex.join(first_compiler().command)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx-tile*) echo "error: no AMX" >&2; exit 1;; esac\n' + f'exec {command} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "find_compilers", lambda named, refusals: find_compilers(str(compiler), refusals))
    monkeypatch.setattr(compiler_module, "NAMES", ())
    monkeypatch.setattr(library, "choose_variant", lambda name: "amx_int8")
    path = library.load_library(library.Build(cache=tmp_path / "cache", num_jobs=2)).path
    assert path == library.build_library(library.Build(cache=tmp_path / "cache"), library.flags_of("avx512_bf16"))
    assert "the CPU kernels use avx512_bf16 instead of amx_int8: " in caplog.text
    with pytest.raises(library.BuildError, match="error: no AMX"):
        library.load_library(library.Build("amx_int8", cache=tmp_path / "cache"))
