"""The simulator of outputs in `make test`: some seeds, known seeds, planted bugs.

The seeds are always the same. `make sim-outputs FIRST=n` tries others.
"""

import pytest

from tests.sim.outputs.campaign import CAMPAIGN
from tests.sim.outputs.known_seeds import KNOWN_SEEDS
from tests.sim.outputs.mutants import MUTANTS, PLANTING
from tests.sim.planting import misplaced


def test_some_seeds():
    summary = CAMPAIGN.run(0, 300, num_jobs=1)
    print(f"{summary.num_seeds} seeds, {summary.numbers['num_events']} events that clients saw")
    assert not summary.failures, CAMPAIGN.failed(summary)


@pytest.mark.parametrize("seed", KNOWN_SEEDS)
def test_known_seeds(seed):
    assert not CAMPAIGN.run_seed(seed).failures


def test_every_planted_bug_has_its_place():
    assert not "".join(misplaced(PLANTING, mutant) for mutant in MUTANTS)
    assert PLANTING.recorded_seeds().keys() == {mutant.name for mutant in MUTANTS}
