"""A worker's Unix socket: the worker gets it, or logs the reason in one line."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire.common.wire.transport.listening import listen_on_socket


@pytest.fixture
def directory() -> Iterator[Path]:
    """A temporary directory with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.mark.parametrize("name", ["rank-0", "a b%41é+#?"])
async def test_any_path_is_reached(directory: Path, name: str) -> None:
    server, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    path = str(directory / name)
    assert listen_on_socket(server, path, None, "--socket") == f"unix:{path}"
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    async with grpc.aio.insecure_channel(f"unix:{quote(path)}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_a_socket_is_not_taken_from_a_server_that_listens(directory: Path) -> None:
    server, path = grpc.aio.server(), str(directory / "rank-0")
    listen_on_socket(server, path, None, "--socket")
    await server.start()
    told = rf"^cannot listen on unix:{path}: another server listens there; choose another --socket$"
    with pytest.raises(OSError, match=told):
        listen_on_socket(grpc.aio.server(), path, None, "--socket")
    await server.stop(0)


async def test_what_a_killed_server_has_left_is_replaced(directory: Path) -> None:
    path = str(directory / "rank-0")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
        left.listen()
    server = grpc.aio.server()
    listen_on_socket(server, path, None, "--socket")
    await server.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    await server.stop(0)


def test_other_reasons_have_their_own_words(directory: Path) -> None:
    server: grpc.aio.Server = None  # none of the cases uses it
    (directory / "file").touch()
    with pytest.raises(OSError, match="the path is a file that is no socket"):
        listen_on_socket(server, str(directory / "file"), None, "--socket")
    assert (directory / "file").exists()
    with pytest.raises(OSError, match=rf"there is no directory {directory}/none"):
        listen_on_socket(server, str(directory / "none" / "rank-0"), None, "--socket")
    if os.getuid() != 0:
        directory.chmod(0o500)
        with pytest.raises(OSError, match=rf"this user may not write to {directory}"):
            listen_on_socket(server, str(directory / "rank-0"), None, "--socket")
