"""Tests of `import pagewire`: its names, its version, and its types for programs that check theirs."""

import subprocess
import sys
from importlib import metadata

import pytest

import pagewire
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
    assert capsys.readouterr().out == f"pagewire {pagewire.__version__}\n"
    assert metadata.version("pagewire") == pagewire.__version__
