"""A client's route to a service, and the events that excuse a request that fails on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.client.channels import Connection
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from tests.sim.outputs.network import Channel, Network


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a route at some time."""

    num_disturbances: int
    is_disturbed: bool
    time: float


class Route:
    def __init__(
        self, networks: tuple[Network, ...], is_served: Callable[[], bool], num_losses: Callable[[], int], time: Any
    ) -> None:
        """`is_served`: returns whether the service at the first network can serve requests, as far as it knows."""
        self.networks = networks
        self._is_served = is_served
        self._num_losses = num_losses
        self._time = time
        self.connection = Connection(Channel(networks[0]), "simulated", ())

    def stub(self) -> Any:
        return pb_grpc.SchedulerServiceStub(Channel(self.networks[0]))

    def moment(self) -> Moment:
        return Moment(
            sum(network.num_cuts for network in self.networks) + self._num_losses(),
            any(self._time() < network.calm_from for network in self.networks) or not self._is_served(),
            self._time(),
        )

    def is_excused(self, before: Moment) -> bool:
        """Return whether something has happened since `before` for which a request may fail with UNAVAILABLE."""
        now = self.moment()
        return before.is_disturbed or now.is_disturbed or now.num_disturbances > before.num_disturbances
