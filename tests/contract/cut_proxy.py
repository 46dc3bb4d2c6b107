"""A TCP proxy in front of a service, whose connections a test can cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from testing.scheduler_stack import serve


class Proxy:
    """A TCP proxy that forwards bytes to `target` until it is cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("grpc://").rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self.url = ""
        self.is_open = True

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Abort every connection immediately."""
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.transport.abort()
            return
        self.num_connections += 1
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, server_writer}
        await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(checkpoint: Path, **options: object) -> AsyncIterator[tuple[object, Proxy]]:
    async with serve(checkpoint, **options) as stack:
        proxy = Proxy(stack.url)
        await proxy.start()
        try:
            yield stack, proxy
        finally:
            await proxy.stop()
