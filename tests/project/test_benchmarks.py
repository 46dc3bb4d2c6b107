"""Tests of `python -m bench`: it lists benchmarks, runs them by name, and keeps and shows their results."""

import argparse
import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import report
from bench.__main__ import FOLDER, GROUPS, benchmarks, main, purpose
from bench.measure import in_turns, medians
from tests.project.documents import DOCUMENTS, ROOT, read

NAME = re.compile(r"\bmake bench NAME=([\w-]+)")


def test_every_benchmark_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = [path for group in GROUPS for path in (FOLDER / group).glob("*.py")]
    assert len(benchmarks()) > 20
    assert len({path.stem for path in files}) == len(files) - len(GROUPS) + 1, "a name twice: only __init__ may be"
    for name, path in benchmarks().items():
        assert re.fullmatch(r"[A-Z][^\n]{20,}[.]", purpose(path)), f"{name}: its first line is no sentence"
        assert f"  {name.replace('_', '-'):18} {purpose(path)}" in lines


def test_benchmarks_have_what_runs_them() -> None:
    for name, path in benchmarks().items():
        functions = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert "main" in functions or {"add_flags", "measure", "report"} <= functions, name


def test_documents_name_benchmarks_that_there_are() -> None:
    named = {name for path in (*DOCUMENTS, Path("Makefile")) for name in NAME.findall(read(path))}
    assert len(named) >= 5
    assert {name.replace("-", "_") for name in named} <= set(benchmarks())


def test_a_benchmark_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "bench", "forks"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "there is no benchmark 'forks'; python -m bench lists them\n"


def module_of(measure: object) -> ModuleType:
    module = ModuleType("made", "Measures nothing.")
    module.add_flags = lambda parser: parser.add_argument("--rounds", type=int, default=3)
    module.measure = measure
    module.report = lambda figures: print(f"rounds: {figures['rounds']}")
    return module


async def measured(arguments: argparse.Namespace) -> dict[str, int]:
    return {"rounds": arguments.rounds}


@pytest.mark.parametrize("is_async", [False, True])
def test_figures_are_kept_and_shown(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    module = module_of(measured if is_async else lambda arguments: {"rounds": arguments.rounds})
    assert report.run("made", module, ["--rounds", "5"]) == 0
    kept = json.loads((tmp_path / "made.json").read_text())
    assert list(kept) == ["machine", "rounds"]
    assert kept["rounds"] == 5
    assert capsys.readouterr().out == "rounds: 5\n"
    module.variant = lambda: "avx2"
    assert report.run("made", module, []) == 0
    assert json.loads((tmp_path / "made.avx2.json").read_text())["rounds"] == 3
    assert report.run("made", module, ["--output", str(tmp_path / "elsewhere.json")]) == 0
    assert (tmp_path / "elsewhere.json").exists()


def test_a_part_leaves_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    module = module_of(lambda arguments: {"rounds": arguments.only or "all"})
    module.add_flags = lambda parser: parser.add_argument("--only", default="")
    module.variant = lambda: "avx2"
    for flags in ([], ["--only", "many"]):
        assert report.run("made", module, flags) == 0
    kept = {path.name: json.loads(path.read_text())["rounds"] for path in tmp_path.iterdir()}
    assert kept == {"made.avx2.json": "all", "made.avx2.many.json": "many"}


def test_an_arm_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.run("made", module_of(lambda arguments: None), []) == 0
    assert list(tmp_path.iterdir()) == []


def test_arms_take_turns_and_warm_up() -> None:
    assert list(in_turns("ab", 2)) == [(0, "b"), (0, "a"), (1, "a"), (1, "b"), (2, "b"), (2, "a")]
    assert list(in_turns("ab", 1, num_warm_ups=0)) == [(1, "a"), (1, "b")]
    rounds = {"a": [{"s": 3.0}, {"s": 1.0}, {"s": 2.0}], "b": [{"s": 4.0, "t": 1.0}, {"s": 6.0}]}
    assert medians(rounds) == {"a": {"s": 2.0}, "b": {"s": 5.0, "t": 0.5}}
