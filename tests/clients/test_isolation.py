"""The programs of these tests reach this machine only."""

import os
import socket

import pytest

from tests.clients.conftest import Served
from tests.clients.program import ISOLATED, PYTHON, programs

OUTSIDE = ("192.0.2.1", 443)  # an address reserved for documentation


def test_no_network_but_loopback() -> None:
    interfaces = [name for _, name in socket.if_nameindex()]
    if os.environ.get(ISOLATED):
        assert interfaces == ["lo"]
        with socket.socket() as connection, pytest.raises(OSError, match="unreachable"):
            connection.connect(OUTSIDE)


async def test_requests_to_the_proxy_are_recorded(served: Served) -> None:
    program = "import httpx2\ntry: httpx2.get('https://example.com')\nexcept httpx2.ProxyError: print('refused')"
    with pytest.raises(AssertionError, match="CONNECT example"):
        async with programs(served.program.home) as outside:
            assert await outside.run(PYTHON / "python", "-c", program) == "refused\n"
