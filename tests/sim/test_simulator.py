"""The simulator in `make test`: half a minute of seeds, known seeds, and that a seed is a history.

The seeds are always the same, from 0 on, so that a run of the tests says something of the code and not of the clock.
`make sim FIRST=n` tries others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.campaign import command_for, run_campaign, run_seed, run_seeds
from tests.sim.known_seeds import KNOWN_SEEDS

ROOT = Path(__file__).parents[2]


def test_half_a_minute_of_seeds():
    num_jobs = len(os.sched_getaffinity(0))
    summary = run_campaign(0, 60_000 * num_jobs, num_jobs, seconds=30)
    print(f"{summary.num_seeds} seeds, {summary.num_audits} audited events")
    assert not summary.failures, "\n".join(
        f"seed {seed}: {error}; {command_for(seed)}" for seed, error in summary.failures.items()
    )


@pytest.mark.parametrize("seed", KNOWN_SEEDS)
def test_known_seeds(seed):
    assert not run_seed(seed).failures


def test_a_seed_is_a_history():
    """The same in another process, where strings hash otherwise."""
    program = "from tests.sim.campaign import run_seeds; print(run_seeds(range(40)).log_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert int(other.stdout) == run_seeds(range(40)).log_hash
    assert run_seeds(range(40)).log_hash != run_seeds(range(1, 41)).log_hash
