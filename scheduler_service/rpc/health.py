"""Standard gRPC health and reflection, where their packages are installed.

`liveness` says that the process is there. The services' own names, and the empty one, say whether to send requests.
"""

import importlib.util
import logging
from collections.abc import Sequence

import grpc.aio

logger = logging.getLogger(__name__)

LIVENESS = "liveness"


class Health:
    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """Adds what there is to a server that has not started, for services that are ready together."""
        self._servicer = None
        self._ready_names = ("", *service_names)
        service_names = list(service_names)
        if importlib.util.find_spec("grpc_health"):
            from grpc_health.v1 import health_pb2
            from grpc_health.v1.health import aio

            self._servicer = aio.HealthServicer()
            self._statuses = {
                True: health_pb2.HealthCheckResponse.SERVING,
                False: health_pb2.HealthCheckResponse.NOT_SERVING,
            }
            self.add_to(server)
            service_names.append(health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        if importlib.util.find_spec("grpc_reflection"):
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection([*service_names, reflection.SERVICE_NAME], server)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answer on one more server that has not started."""
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_liveness(self) -> None:
        await self._set(LIVENESS, True)

    async def set_readiness(self, is_serving: bool) -> None:
        for name in self._ready_names:
            await self._set(name, is_serving)

    async def _set(self, name: str, is_serving: bool) -> None:
        if self._servicer is not None:
            await self._servicer.set(name, self._statuses[is_serving])
