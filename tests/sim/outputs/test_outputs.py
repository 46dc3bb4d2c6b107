"""The simulator of outputs in `make test`: some seeds, known seeds, planted bugs, and that a seed is a history.

The seeds are always the same. `make sim-outputs FIRST=n` tries others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.outputs.campaign import CAMPAIGN
from tests.sim.outputs.known_seeds import KNOWN_SEEDS
from tests.sim.outputs.mutants import MUTANTS, PLANTING
from tests.sim.planting import misplaced

ROOT = Path(__file__).parents[3]


def test_some_seeds():
    summary = CAMPAIGN.run(0, 200, num_jobs=1)
    print(f"{summary.num_seeds} seeds, {summary.numbers['num_events']} events that clients saw")
    assert not summary.failures, CAMPAIGN.failed(summary)


@pytest.mark.parametrize("seed", KNOWN_SEEDS)
def test_known_seeds(seed):
    assert not CAMPAIGN.run_seed(seed).failures


def test_every_planted_bug_has_its_place():
    assert not "".join(misplaced(PLANTING, mutant) for mutant in MUTANTS)
    assert PLANTING.recorded_seeds().keys() == {mutant.name for mutant in MUTANTS}


def test_a_seed_is_a_history():
    """The same in another process, where strings hash otherwise, and objects lie elsewhere."""
    program = "from tests.sim.outputs.campaign import CAMPAIGN; print(CAMPAIGN.run_seeds(range(40)).log_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert int(other.stdout) == CAMPAIGN.run_seeds(range(40)).log_hash
    assert CAMPAIGN.run_seeds(range(40)).log_hash != CAMPAIGN.run_seeds(range(1, 41)).log_hash
