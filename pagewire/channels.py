"""Holds a client's channels to one server, each opened when it is first used: one for threads, one for each event
loop.
"""

import asyncio
import re
import threading
from types import ModuleType
from typing import Any

import grpc
import grpc.aio

from pagewire.authorized_channel import AuthorizedChannel
from pagewire.common.transport.dialling import open_channel
from pagewire.common.transport.http_proxy import http_proxy_of
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from pagewire.shared_stream import SharedStream

OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A long prefill sends no data for a while; pings go on.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that comes back is found soon, by whoever waits for it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class LoopConnection:
    """The connection that the tasks of one event loop share. `shared` is None if the server does not know
    GenerateMany.
    """

    def __init__(self, channel: Any, url: str) -> None:
        self._channel = channel
        self.stub = pb_grpc.SchedulerServiceStub(channel)
        self.shared: SharedStream | None = SharedStream(self.stub.GenerateMany, url)
        self.num_in_flight = 0

    async def close(self) -> None:
        if self.shared is not None:
            await self.shared.close()
        await self._channel.close()


class Channels:
    """The channels of a client. A channel that is used after it was closed is opened again."""

    def __init__(self, url: str, credentials: grpc.ChannelCredentials | None, api_key: str | None) -> None:
        """Opens nothing yet. Raises ValueError for a url without a port."""
        self._url = url
        self._target = _target(url)
        self._credentials = credentials
        self._api_key = api_key
        self._lock = threading.Lock()
        self._channel: Any = None
        self._connections: dict[asyncio.AbstractEventLoop, LoopConnection] = {}

    @property
    def stub(self) -> pb_grpc.SchedulerServiceStub:
        """The stub for calls from any thread."""
        with self._lock:
            if self._channel is None:
                self._channel = self._open(grpc)
            return pb_grpc.SchedulerServiceStub(self._channel)

    @property
    def of_loop(self) -> LoopConnection:
        """The connection for tasks of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for ended in [other for other in self._connections if other.is_closed()]:
                del self._connections[ended]
            if loop not in self._connections:
                channel = self._open(grpc.aio)
                self._connections[loop] = LoopConnection(channel, self._url)
            return self._connections[loop]

    def close(self) -> None:
        """Closes the channel of the threads."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    async def aclose(self) -> None:
        """Closes the channel of the running event loop, and that of the threads."""
        with self._lock:
            connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.close()
        self.close()

    def _open(self, api: ModuleType) -> Any:
        is_proxied = http_proxy_of(self._target) is not None
        channel = open_channel(api, self._target, self._credentials, OPTIONS, uses_http_proxy=is_proxied)
        return channel if self._api_key is None else AuthorizedChannel(channel, self._api_key)


def _target(url: str) -> str:
    """Makes a gRPC target of a url. Raises ValueError for a url without a port."""
    target = re.sub("^grpcs?://", "", url).rstrip("/")
    if re.match("(dns|unix|unix-abstract|ipv4|ipv6|vsock|xds):", target):
        return target
    if not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):[0-9]+", target):
        raise ValueError(f"{url!r} is not a server's address: give HOST:PORT, such as 127.0.0.1:50051")
    return target
