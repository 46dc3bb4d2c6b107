"""A service that listens on :: accepts IPv6 and IPv4, also on machines with only one address family."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from prometheus_client.registry import Collector

from pagewire.common.wire.transport.listening import check_port, create_server, listen
from scheduler_service.metrics_server import MetricsServer

NAMESPACE = ["unshare", "--map-root-user", "--net"]


class NoMetrics(Collector):
    def collect(self) -> Iterator[object]:
        return iter(())


def why_no_namespaces() -> str:
    """Return the reason why this machine cannot create network namespaces, or an empty string if it can."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "there is no unshare, or no ip"
    tried = subprocess.run([*NAMESPACE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"network namespaces cannot be made: {tried.stderr.strip()}"


@pytest.mark.parametrize("family", ["4", "6"])
def test_services_are_reached_where_there_is_one_family(family: str) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    command = [*NAMESPACE, sys.executable, "-m", "tests.contract.one_family", family]
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of them answer at" in done.stdout


@pytest.fixture(params=[True, False], ids=["dual stack", "no IPv6"])
def has_ipv6(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    if not request.param:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    return request.param


@pytest.mark.parametrize("host", ["::", "[::]"])
async def test_ports_listen_everywhere(host: str, has_ipv6: bool) -> None:
    server = create_server()
    port = listen(server, host, 0, None, "--port")
    metrics = MetricsServer(NoMetrics(), host, 0)
    await server.start()
    try:
        for here in ["127.0.0.1", *(["[::1]"] if has_ipv6 else [])]:
            url = f"http://{here}:{metrics.port}/metrics"
            with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as response:
                assert response.status == 200
            async with grpc.aio.insecure_channel(f"{here}:{port}") as channel:
                await channel.channel_ready()
    finally:
        metrics.close()
        await server.stop(0)


def test_a_port_that_is_taken_in_one_family_is_taken(has_ipv6: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            check_port("::", port, "--port")
