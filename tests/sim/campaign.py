"""Campaigns of the simulator of the scheduler and a failing worker."""

from tests.sim.seeds import Campaign
from tests.sim.simulation import Simulation

CAMPAIGN = Campaign(Simulation, "python -m tests.sim", ("num_audits", "num_steps"))
