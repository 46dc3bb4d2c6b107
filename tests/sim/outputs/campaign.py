"""Campaigns of the simulator of outputs."""

from tests.sim.outputs.simulation import Simulation
from tests.sim.seeds import Campaign

CAMPAIGN = Campaign(Simulation, "python -m tests.sim.outputs", ("num_events",))
