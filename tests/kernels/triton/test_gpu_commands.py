"""The commands `make gpu-check-kernels` and `make gpu-bench-kernels`, without real kernels."""

import collections
import importlib
import json

import pytest

from bench.gpu import kernels
from testing.kernel_checks import MODULES
from testing.kernel_checks.case import COPY, MATMUL
from tests.gpu import check_kernels

SCRIPTED = "tests.kernels.triton.scripted_checks"


def run_checks(tmp_path, *modules: str, seconds: float = 280) -> tuple[int, dict[str, dict]]:
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--output", str(path), "--seconds", str(seconds), "--modules", *modules]
    status = check_kernels.main(arguments)
    parts = json.loads(path.read_text())["parts"].values()
    return status, {result["name"]: result for part in parts for result in part["results"]}


def test_cases_have_names_of_their_own_and_goals_that_can_be_judged():
    modules = [importlib.import_module(name) for name in MODULES]
    for offer in ("device_cases", "bench_cases", "compile_cases"):
        cases = [case for module in modules for case in getattr(module, offer)()]
        assert [name for name, count in collections.Counter(case.name for case in cases).items() if count > 1] == []
    bench_cases = {case.name: case for module in modules for case in module.bench_cases()}
    for case in bench_cases.values():
        assert case.bytes_moved or case.flops, case.name
        for goal in case.goals:
            assert goal.of in {COPY, MATMUL, *bench_cases}, case.name
            assert case.bytes_moved or goal.of != COPY, case.name
            assert case.flops or goal.of != MATMUL, case.name
    assert sum(len(case.goals) for case in bench_cases.values()) >= 10


def test_a_case_that_fails_or_kills_its_process_costs_that_case_alone(tmp_path):
    status, results = run_checks(tmp_path, SCRIPTED)
    assert status == 1
    assert list(results) == ["first", "wrong", "deadly", "deadly again", "last"]
    errors = {name: result.get("error") for name, result in results.items()}
    assert errors["first"] is errors["last"] is None
    assert errors["wrong"] == "AssertionError: row 3 differs, seed 1"
    assert errors["deadly"] == errors["deadly again"] == "its process died with status 7"


def test_a_module_that_cannot_be_loaded_is_a_failure(tmp_path):
    status, results = run_checks(tmp_path, "tests.kernels.triton.no_such_checks")
    assert status == 1
    assert results["tests.kernels.triton.no_such_checks"]["error"] == "its process ended with status 1"


def test_what_was_not_reached_in_time_is_a_failure(tmp_path):
    status, results = run_checks(tmp_path, SCRIPTED, seconds=0)
    assert status == 1
    assert "out of time" in results[SCRIPTED]["error"]


def test_nothing_is_timed_without_a_device(capsys):
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu"])
    assert "there is nothing to time on cpu" in capsys.readouterr().err


def test_goals_are_judged_by_bandwidth_rate_and_time():
    def timed(name: str, seconds: float, bytes_moved: int = 0, flops: int = 0, **goals: float) -> dict:
        wanted = [{"share": share, "of": of} for of, share in goals.items()]
        return {"name": name, "seconds": seconds, "bytes_moved": bytes_moved, "flops": flops, "goals": wanted}

    results = [
        timed("copy", 2.0, bytes_moved=8000),  # 4,000 bytes per second
        timed("matmul", 1.0, flops=100),
        timed("v1", 6.0),
        timed("v2", 1.0, bytes_moved=3200, flops=60, copy=0.8, v1=5.0, matmul=0.7),
        timed("alone", 1.0, missing=1.0),
    ]
    judged = {(goal["name"], goal["of"]): (goal["value"], goal["met"]) for goal in kernels.judge(results)}
    assert judged == {
        ("v2", "copy"): (0.8, True),
        ("v2", "v1"): (6.0, True),
        ("v2", "matmul"): (0.6, False),
        ("alone", "missing"): (None, False),
    }
