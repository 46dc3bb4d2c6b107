"""Clients and links that connect to a wrong port get an error that says what the port looks like."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import Metric

import pagewire
from pagewire import AsyncClient, Client
from pagewire.client import wire
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2_grpc
from scheduler_service import front_end, server
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.links import reconnection
from scheduler_service.metrics_server import MetricsServer
from testing.serving.certificates import self_signed
from testing.serving.scripted_scheduler import ScriptedScheduler, serving
from tests.contract.raw_port import listener

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
# A HEADERS frame that ends its stream, with `:status 404` from HPACK's static table.
HEADERS, NOT_FOUND = b"\0\0\1\1\5", b"\x8d"


def web_server(connection: socket.socket) -> None:
    """Answer HTTP/2 requests as a router answers an unknown path."""
    received = connection.recv(len(PREFACE), socket.MSG_WAITALL)
    assert received == PREFACE
    connection.sendall(SETTINGS)
    while True:
        head = connection.recv(9, socket.MSG_WAITALL)
        if len(head) < 9:
            return
        connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
        if head[3] == 1:
            connection.sendall(HEADERS + head[5:] + NOT_FOUND)


def hangs_up(connection: socket.socket) -> None:
    connection.recv(100)


class NoMetrics:
    def collect(self) -> Iterator[Metric]:
        return iter(())


@contextmanager
def metrics() -> Iterator[str]:
    server = MetricsServer(NoMetrics(), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.port}"
    server.close()


@contextmanager
def worker() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker_pb2_grpc.WorkerServiceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


PORTS = {
    "web server": (lambda: listener(web_server), "", "answers as a web server, not as gRPC"),
    "metrics": (metrics, "", "answers, but not in HTTP/2: it looks like a port for metrics"),
    "worker": (worker, "", "speaks gRPC, but does not have this method: it looks like a worker's port"),
    "hangs up": (lambda: listener(hangs_up), "", "accepts connections and closes them: it looks like a port with TLS"),
    "no TLS": (lambda: serving(ScriptedScheduler()), "grpcs://", "answers without TLS: leave out grpcs://"),
    "metrics without TLS": (metrics, "grpcs://", "answers without TLS: leave out grpcs://"),
}


@pytest.mark.parametrize("name", PORTS)
async def test_a_wrong_port_is_told_by_what_it_looks_like(name: str) -> None:
    made, scheme, text = PORTS[name]
    with made() as address:
        url = scheme + address
        calls = [lambda client: client.info(), lambda client: client.complete("Once", timeout=20)]
        with Client(url) as client:
            for call in calls:
                with pytest.raises(pagewire.PagewireError, match=f"^{url} {text}"):
                    await asyncio.to_thread(call, client)
        async with AsyncClient(url) as client:
            with pytest.raises(pagewire.PagewireError, match=f"^{url} {text}"):
                await anext(client.stream("Once", timeout=20))
            with pytest.raises(pagewire.PagewireError, match=f"^{url} {text}"):
                await client.submit("Once")


def test_a_port_with_tls_is_told() -> None:
    certificate = self_signed("localhost")
    credentials = grpc.ssl_server_credentials([(certificate.key, certificate.cert)])
    with serving(ScriptedScheduler(), credentials) as address:
        with Client(address) as client, pytest.raises(pagewire.Unavailable, match=r"a port with TLS \(grpcs://\)"):
            client.info()
        with Client(f"grpcs://{address}") as client, pytest.raises(pagewire.Unavailable, match="give tls_ca"):
            client.info()


class Removed(grpc.RpcError):
    """An error that gRPC sometimes reports if a web server ends a stream."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN

    def details(self) -> str:
        return "Stream removed (Data frame with END_STREAM flag received)"

    def trailing_metadata(self) -> None:
        return None


def test_a_removed_stream_is_one_of_a_web_server() -> None:
    assert str(wire.decode_error(Removed(), "h:1")).startswith("h:1 answers as a web server, not as gRPC")


@pytest.mark.parametrize("details", ["Secure read failed", "Stream removed (Socket closed)"])
def test_a_stream_that_breaks_says_nothing_of_the_port(details: str) -> None:
    """With and without TLS, as after the end of the server's process."""

    class Broken(Removed):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return details

    assert "looks like" not in str(wire.decode_error(Broken(), "grpcs://h:1"))


class Warnings(logging.Handler):
    """Collects the warnings that are logged from now on, for one event loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())


SCHEDULER = "no session with the worker: its port "
FRONT_END = "no session with the scheduler at {address}: its port "
LINKS = {
    "a scheduler's": (
        lambda: serving(ScriptedScheduler()),
        SCHEDULER,
        "does not have this method: it looks like a scheduler's",
    ),
    "a router's": (lambda: listener(web_server), SCHEDULER, "answers as a web server"),
    "metrics": (metrics, SCHEDULER, "answers, but not in HTTP/2: it looks like a port for metrics"),
    "a worker's": (worker, FRONT_END, "does not have this method: it looks like a worker's port"),
    "a router's for the scheduler's": (lambda: listener(web_server), FRONT_END, "answers as a web server"),
    "metrics for the scheduler's": (metrics, FRONT_END, "answers, but not in HTTP/2: it looks like a port for metrics"),
    "hangs up": (lambda: listener(hangs_up), FRONT_END, "it looks like a port with TLS (--scheduler-tls-ca), or"),
}


@pytest.mark.parametrize("name", LINKS)
async def test_a_link_to_a_wrong_port_is_told_by_what_it_looks_like(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnection, "_EXPLAIN_INTERVAL", 0.01)
    made, begin, told = LINKS[name]
    warnings, stop = Warnings(), asyncio.Event()
    with made() as address:
        common = {"model": str(checkpoint), "port": 0, "metrics_port": 0}
        if begin is SCHEDULER:
            run, config, flag = server.run, SchedulerConfig(**common, worker=address), "--worker"
        else:
            run, config, flag = front_end.run, FrontEndConfig(**common, scheduler=address), "--scheduler"
        logging.getLogger("scheduler_service.links").addHandler(warnings)
        running = asyncio.create_task(run(config, stop=stop, stop_now=stop, ready=lambda url: None))
        try:
            line = await asyncio.wait_for(warnings.lines.get(), 20)
        finally:
            logging.getLogger("scheduler_service.links").removeHandler(warnings)
            stop.set()
            await running
    assert line.startswith(begin.format(address=address))
    assert told in line
    assert f"port of a {'worker' if begin is SCHEDULER else 'scheduler'} in {flag}, which is 500" in line
    assert "\n" not in line
