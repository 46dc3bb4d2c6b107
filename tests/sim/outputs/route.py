"""The way of clients to a service, and what may excuse that a request on it is not served."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.client.channels import Connection
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from tests.sim.outputs.network import Channel, Network


@dataclass(frozen=True, slots=True)
class Moment:
    """What a route is like at some time."""

    num_disturbances: int
    is_disturbed: bool
    time: float


class Route:
    def __init__(
        self, networks: tuple[Network, ...], is_served: Callable[[], bool], num_losses: Callable[[], int], time: Any
    ) -> None:
        """`is_served`: whether those who come by the first network are served, as far as is known there."""
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
        """Whether something has happened since that moment for which a request may be told to go elsewhere."""
        now = self.moment()
        return before.is_disturbed or now.is_disturbed or now.num_disturbances > before.num_disturbances
