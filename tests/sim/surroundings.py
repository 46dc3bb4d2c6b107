"""The surroundings of the step loop in a simulation: the link to a worker, and an observer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.common.wire.messages import StepPlan
from scheduler_service.core.request import Request, SequenceEnd
from scheduler_service.serving.observer import Observer
from tests.sim.connection import Connection

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Link:
    """The step loop's link to the worker for one epoch."""

    def __init__(self, simulation: Simulation, connection: Connection) -> None:
        self._simulation = simulation
        self._connection = connection

    def send(self, plan: StepPlan) -> None:
        self._simulation.send(self._connection, plan)

    def close(self, reason: str) -> None:
        self._simulation.close(self._connection, reason)


class Witness(Observer):
    """An observer that checks that each end is reported once to observers, as to clients."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ended: set[int] = set()

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        assert end.sequence_id not in self._ended, "S6: two ends"
        self._ended.add(end.sequence_id)
        assert self._simulation.client_of[end.sequence_id].request is request, "an end of another request"

    def invariant_failed(self) -> None:
        raise AssertionError("an invariant is broken that the simulator has not seen broken")
