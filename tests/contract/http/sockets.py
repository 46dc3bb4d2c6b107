"""Raw TCP connections to the HTTP API of a server."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from testing.serving.http_server import HttpServer

PATH = "/v1/completions"
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
_AHEAD_BYTES = 1 << 20
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(
    server: HttpServer, tls: ssl.SSLContext | None = None, num_ahead: int | None = None
) -> AsyncIterator[Stream]:
    """Open a connection to the server.

    `num_ahead`: approximately how many bytes the client's socket and reader buffer before the test reads them.
    """
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if num_ahead is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_ahead)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        limit = num_ahead or _AHEAD_BYTES
        name = None if tls is None else host
        reader, writer = await asyncio.open_connection(sock=client, ssl=tls, server_hostname=name, limit=limit)
        try:
            async with asyncio.timeout(30):
                yield reader, writer
        finally:
            writer.close()


def posted(head: str = "", **asked: Any) -> bytes:
    content = json.dumps({"prompt": "x", "seed": 0} | asked).encode()
    return f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def answer_to(server: HttpServer, sent: bytes) -> bytes:
    """Return all bytes until the server closes the connection, or no bytes if the server resets it."""
    async with connected(server) as (reader, writer):
        try:
            writer.write(sent)
            return await reader.read()
        except ConnectionError:
            return b""


async def status_of(server: HttpServer, sent: bytes) -> int:
    """Send a request on a connection that stays open. Return the status of the response."""
    async with connected(server) as (reader, writer):
        writer.write(sent)
        return int((await reader.readline()).split()[1])
