"""What is said of a library that does not load."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagewire.kernels.cpu import library


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (0, "; remove it to have it built again"),
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
