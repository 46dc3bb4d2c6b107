"""Standard gRPC health and reflection, where their packages are installed.

`liveness` says that the process is there. The services' own names, and the empty one, say whether to send requests.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Sequence

import grpc.aio

from pagewire.common.wire.transport.listening import create_server, listen

LIVENESS = "liveness"
MAX_PROBES = 16  # connections of the port that answers probes alone


class Health:
    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """Add health and reflection to a server that has not started, for services that are ready together."""
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
        """Answer probes that know no certificates on a port of their own, unless that is 0. Raises OSError."""
        if port:
            self._probed = create_server(
                # Connections without a call are closed, and those whose client is gone: they keep no probe out.
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
        """Say that the process is there, and that nothing is ready yet."""
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
        """Keep readiness at `is_serving`, which may be another whenever `changed` is set.

        `announce` is called each time, `ready` once, when requests are first served.
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
