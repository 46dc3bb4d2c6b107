"""The runtime directory of a server: its permissions, and its removal however the process ends."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.hosting.runtime_directory import RuntimeDirectory

HOLDER = """
import sys
from pagewire.hosting.runtime_directory import RuntimeDirectory
with RuntimeDirectory({"XDG_RUNTIME_DIR": sys.argv[1]}) as path:
    (path / "rank-0").touch()
    print(path, flush=True)
    sys.stdin.read()
"""


def of(base: Path) -> RuntimeDirectory:
    return RuntimeDirectory({"XDG_RUNTIME_DIR": str(base)})


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_no_other_user_may_enter_and_it_is_gone_at_the_end(base: Path) -> None:
    before = os.umask(0)
    try:
        with of(base) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert path.parent == base
            assert len(f"{path}/rank-1023") <= 107
            (path / "rank-0").touch()
            assert list(base.iterdir()) == [path]
    finally:
        os.umask(before)
    assert list(base.iterdir()) == []


def test_it_is_gone_after_an_error_too(base: Path) -> None:
    with pytest.raises(KeyboardInterrupt), of(base):
        raise KeyboardInterrupt
    assert list(base.iterdir()) == []


def test_directories_of_killed_processes_are_removed(base: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        with of(base):
            assert (held / "rank-0").exists(), "its process lives"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (held / "rank-0").exists()
    with of(base) as path:
        assert list(base.iterdir()) == [path]


def test_other_files_are_not_removed(base: Path) -> None:
    names = ("pagewire-serve-model", "pagewire-serve-" + "g" * 16, "pagewire-" + "0" * 16, "other")
    for name in names:
        (base / name).mkdir()
    (base / ("pagewire-serve-" + "0" * 16)).touch()  # a file, not a directory
    (base / ("pagewire-serve-" + "1" * 16)).symlink_to(base / "other")
    with of(base):
        pass
    assert {path.name for path in base.iterdir()} == {
        *names,
        "pagewire-serve-" + "0" * 16,
        "pagewire-serve-" + "1" * 16,
    }


@pytest.mark.parametrize("named", ["", "run", "/no/such/directory", "/" + "x" * 60, "/a,b"])
def test_the_directory_falls_back_to_tmp(named: str) -> None:
    assert RuntimeDirectory({"XDG_RUNTIME_DIR": named}).path.parent == Path("/tmp")
    assert RuntimeDirectory({}).path.parent == Path("/tmp")


@pytest.mark.parametrize("name", ["x" * 60, "a,b"])
def test_a_directory_that_is_there_but_whose_name_cannot_be_used_is_left_alone(base: Path, name: str) -> None:
    (base / name).mkdir()
    assert of(base / name).path.parent == Path("/tmp")


def test_a_relative_directory_that_is_there_is_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "run").mkdir()
    monkeypatch.chdir(base)
    assert of(Path("run")).path.parent == Path("/tmp")


def test_a_directory_that_cannot_be_made_is_one_line(base: Path) -> None:
    directory = of(base)
    base.rmdir()
    with pytest.raises(OSError, match=rf"^cannot make a directory .* in {base} \(No such file .*XDG_RUNTIME_DIR$"):
        directory.__enter__()
