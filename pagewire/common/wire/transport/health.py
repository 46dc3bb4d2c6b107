"""The standard gRPC health and reflection services, if their packages are installed.

The name `liveness` reports that the process runs. The names of the services and the empty name report readiness for
requests.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Sequence

import grpc.aio

from pagewire.common.wire.transport.listening import create_server, listen

LIVENESS = "liveness"
MAX_PROBES = 16  # connections to the port that answers only probes


class Health:
    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """Add the gRPC health and reflection services to a server that has not started. All services in `service_names`
        become ready together.
        """
        self._servicer = None
        self._probed: grpc.aio.Server | None = None
        self._ready_names = ("", *service_names)
        if importlib.util.find_spec("grpc_health"):
            from grpc_health.v1 import health_pb2
            from grpc_health.v1.health import aio

            self._servicer = aio.HealthServicer()
            self._statuses = {
                True: health_pb2.HealthCheckResponse.SERVING,
                False: health_pb2.HealthCheckResponse.NOT_SERVING,
            }
            self._add_to(server)
            service_names = [*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        if importlib.util.find_spec("grpc_reflection"):
            from grpc_reflection.v1alpha import reflection

            reflection.enable_server_reflection([*service_names, reflection.SERVICE_NAME], server)

    def listen(self, host: str, port: int) -> None:
        """Answer health probes on a separate plaintext port, for clients without certificates. Port 0 disables this.
        Raises OSError if the port cannot be bound.
        """
        if port:
            self._probed = create_server(
                # Close connections without RPCs and connections whose client is gone, so that they do not lock out
                # probes.
                ("grpc.max_connection_idle_ms", 2_000),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", 5_000),
                max_connections=MAX_PROBES,
            )
            self._add_to(self._probed)
            listen(self._probed, host, port, None, "--health-port")

    def _add_to(self, server: grpc.aio.Server) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def begin(self) -> None:
        """Report through the health service that the process runs and that no service is ready yet. Start the server on
        the separate port for probes, if there is one.
        """
        await self._set(LIVENESS, True)
        await self.set_readiness(False)
        if self._probed is not None:
            await self._probed.start()

    async def end(self) -> None:
        if self._probed is not None:
            await self._probed.stop(0)

    async def set_readiness(self, is_serving: bool) -> None:
        for name in self._ready_names:
            await self._set(name, is_serving)

    async def follow(
        self,
        changed: asyncio.Event,
        is_serving: Callable[[], bool],
        announce: Callable[[], None],
        ready: Callable[[], None],
    ) -> None:
        """Keep the status in the health service up to date. Each time that `changed` is set, call `announce`, and
        report the result of `is_serving` as the readiness of the services.

        `ready` is called once, when the services become ready for the first time. The loop runs until cancelled.
        """
        has_served = False
        while True:
            await changed.wait()
            changed.clear()
            announce()
            serving = is_serving()
            await self.set_readiness(serving)
            if serving and not has_served:
                has_served = True
                ready()

    async def _set(self, name: str, is_serving: bool) -> None:
        if self._servicer is not None:
            await self._servicer.set(name, self._statuses[is_serving])
