"""The simulator of outputs in `make test`: some seeds, known seeds and planted bugs.

The seeds are always the same. `make sim-outputs FIRST=n` tries others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.campaign import CAMPAIGN as CORE
from tests.sim.outputs.campaign import CAMPAIGN
from tests.sim.outputs.known_seeds import KNOWN_SEEDS
from tests.sim.outputs.mutants import MUTANTS, PLANTING
from tests.sim.planting import misplaced
from tests.thorough import thorough

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("first", "num_seeds"), [(0, 100), *thorough((100, 200))])
def test_some_seeds(first, num_seeds):
    summary = CAMPAIGN.run(first, num_seeds, num_jobs=1)
    print(f"{summary.num_seeds} seeds, {summary.numbers['num_events']} events that clients saw")
    assert not summary.failures, CAMPAIGN.failed(summary)


@pytest.mark.parametrize("seed", KNOWN_SEEDS)
def test_known_seeds(seed):
    assert not CAMPAIGN.run_seed(seed).failures


def test_every_planted_bug_has_its_place():
    assert not "".join(misplaced(PLANTING, mutant) for mutant in MUTANTS)
    assert PLANTING.recorded_seeds().keys() == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("num_seeds", [10, *thorough(40)])
@pytest.mark.parametrize("campaign", [CORE, CAMPAIGN])
def test_a_seed_is_a_history(campaign, num_seeds):
    """A seed gives the same history in another process, where string hashes and object addresses differ."""
    module = "tests.sim.campaign" if campaign is CORE else "tests.sim.outputs.campaign"
    program = f"from {module} import CAMPAIGN; print(CAMPAIGN.run_seeds(range({num_seeds})).log_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert int(other.stdout) == campaign.run_seeds(range(num_seeds)).log_hash
    assert campaign.run_seeds(range(num_seeds)).log_hash != campaign.run_seeds(range(1, num_seeds + 1)).log_hash
