"""The simulator in `make test`: 300 seeds, known seeds, and a check that a seed determines a history.

The seeds are always the same, so that the result depends on the code alone. `make sim FIRST=n` tries others.
"""

import ast
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.campaign import CAMPAIGN
from tests.sim.known_seeds import KNOWN_SEEDS
from tests.sim.mutants import MUTANTS, PLANTING
from tests.sim.planting import Mutant, Patch, hunt_all, misplaced, planted
from tests.sim.simulation import Simulation
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("first", "num_seeds"), [(0, 300), *thorough((300, 700))])
def test_some_seeds(first, num_seeds):
    summary = CAMPAIGN.run(first, num_seeds, num_jobs=1)
    print(f"{summary.num_seeds} seeds, {summary.numbers['num_audits']} audited events")
    assert not summary.failures, CAMPAIGN.failed(summary)


@pytest.mark.parametrize("seed", KNOWN_SEEDS)
def test_known_seeds(seed):
    assert not CAMPAIGN.run_seed(seed).failures


def test_every_planted_bug_has_its_place():
    assert not "".join(misplaced(PLANTING, mutant) for mutant in MUTANTS)
    assert {mutant.name for mutant in MUTANTS}.issuperset(KNOWN_SEEDS.values())
    assert PLANTING.recorded_seeds().keys() == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("x and y", "x", "if x:\n    g(x, y)\n    h()"),
        ("g(x, y)", "", "if x and y:\n    pass\n    h()"),
        ("g(x, y)\nh()", "", "if x and y:\n    pass"),
    ],
)
def test_a_bug_is_planted_whatever_the_layout(old, new, expected):
    source = "class A:\n def f(x, y):\n  if (x  # or not\n   and y):\n   g(x,\n   y); h()\ndef g(x, y):\n x and y"
    [changed, same] = ast.parse(planted(source, Patch("A.f", old, new))).body
    assert ast.unparse(changed.body[0].body) == expected
    assert ast.unparse(same.body) == "x and y"


def test_planted_bug_without_a_place_is_reported():
    none = misplaced(PLANTING, Mutant("a bug", (Patch("WorkerRows.vacate", "self.num_open -= 7", ""),)))
    assert none == "a bug: WorkerRows.vacate has this 0 times, not once:\nself.num_open -= 7\n"
    two = misplaced(PLANTING, Mutant("a bug", (Patch("MoveLedger.acknowledge", "move.free_list", "0"),)))
    assert "MoveLedger.acknowledge has this 2 times, not once (scheduler_service/core/cache/tiers.py, " in two


@pytest.mark.thorough
def test_a_bug_is_found_by_its_recorded_seed_or_another(monkeypatch, tmp_path, capsys):
    """Each bug is checked even if few seeds run. A bug that no seed finds fails the run."""
    by_record, by_another, by_none = (
        "a request that is too long is admitted",
        "prompt log-probabilities outlive the end of their request",
        "a group that can never fit is admitted",
    )
    seeds = {**PLANTING.recorded_seeds(), by_another: 0, by_none: 0}
    planting = replace(PLANTING, found_by=tmp_path / "found_by.json")
    planting.found_by.write_text(json.dumps(seeds))
    monkeypatch.setattr(sys, "argv", ["mutants", "--seeds=0", "--jobs=1", "--record", by_record, by_another, by_none])
    assert hunt_all(planting, "mutants") == 1
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert said[by_record].startswith(f"caught by seed {seeds[by_record]}, number 1: ")
    assert "; seed 0 finds it no more" in said[by_another]
    assert said[by_none].startswith("NOT CAUGHT: seed 0 finds it no more")
    assert planting.recorded_seeds() == {**seeds, by_another: 240}


@pytest.mark.parametrize("seeds", [range(20), *thorough(range(20, 100))], ids=str)
def test_ended_requests_are_freed_without_garbage_collection(seeds):
    """Requests and faults of every kind leave no object of the scheduler that only the garbage collector frees."""
    gc.collect()
    gc.freeze()  # otherwise two hundred collections would each traverse everything that other tests imported
    gc.disable()
    try:
        for seed in seeds:
            simulation = Simulation(seed)
            simulation.run()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            left = {type(found) for found in gc.garbage if type(found).__module__.startswith("scheduler_service")}
            gc.garbage.clear()
            assert not left, f"seed {seed}"
            del simulation  # the simulation itself is a reference cycle
            gc.collect()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
