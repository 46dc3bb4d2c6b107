"""Tests of `import pagewire`: its names, its version, and its types for programs that check theirs."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pagewire
from pagewire import installation
from pagewire.cli.command import main


def test_every_name_is_there_and_listed() -> None:
    assert set(pagewire.__all__) <= set(dir(pagewire))
    for name in pagewire.__all__:
        assert getattr(pagewire, name) is not None


def test_names_are_listed_before_any_is_used() -> None:
    program = "import pagewire; assert 'Client' in dir(pagewire) and 'pagewire.client' not in __import__('sys').modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_there_is_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    assert re.fullmatch(rf"pagewire {re.escape(pagewire.__version__)}( \(commit [0-9a-f]{{7,}}(-dirty)?\))?\n", told)
    assert metadata.version("pagewire") == pagewire.__version__


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C")


def make_clone(folder: Path, project: str) -> str:
    """Make a repository whose pyproject.toml names the project, and return the begin of its commit's id."""
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, str(folder), *command], check=True)
    return subprocess.run([*GIT, str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[
        :7
    ]


def test_the_version_names_the_commit_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_TREE", tmp_path)
    made = make_clone(tmp_path, "pagewire")
    assert installation.commit() == made
    (tmp_path / "pyproject.toml").write_text('name = "pagewire"  # changed')
    assert installation.commit() == f"{made}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.commit() == "", "without git"


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        ('{"url": "https://a", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}', "0123456"),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', ""),
        ("no JSON", ""),
        (None, ""),
    ],
)
def test_the_version_names_the_commit_of_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: str | None, expected: str
) -> None:
    """The installation is in a directory of packages, which is in the repository of another project."""
    make_clone(tmp_path, "other")
    monkeypatch.setattr(installation, "_TREE", tmp_path)
    folder = tmp_path / "pagewire-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pagewire\nVersion: 0\n")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installation.commit() == expected
