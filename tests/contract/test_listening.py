"""Ports that cannot be opened: one line names the port and its flag, without gRPC's messages, and the
exit status is 1.
"""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.common.wire.transport import health
from pagewire.common.wire.transport.addresses import join
from pagewire.common.wire.transport.listening import (
    check_port,
    create_server,
    listen,
    lower_grpc_pool_priority,
    refusal,
)
from pagewire.common.wire.transport.port_owner import owner_of
from pagewire.common.wire.transport.tls import TlsFiles
from pagewire.hosting.supervisor import free_port
from testing.serving.certificates import Authority

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "storyteller")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


SCHEDULER = ["scheduler", "--model", MODEL, "--worker=127.0.0.1:1"]
SERVE = ["serve", MODEL, "--port=0"]


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["serve", MODEL, "--metrics-port=0"], "--port"),
        (SERVE, "--metrics-port"),
        ([*SERVE, "--metrics-port=0"], "--health-port"),
        ([*SERVE, "--metrics-port=0"], "--http-port"),
        ([*SCHEDULER, "--metrics-port=0"], "--port"),
        ([*SCHEDULER, "--port=0"], "--metrics-port"),
        ([*SCHEDULER, "--port=0", "--metrics-port=0"], "--health-port"),
        (["worker", "--model", MODEL], "--port"),
        (["worker", "--model", MODEL, "--port=0"], "--health-port"),
        (["frontend", "--model", MODEL, "--scheduler=127.0.0.1:1"], "--port"),
        (["frontend", "--model", MODEL, "--scheduler=127.0.0.1:1", "--port=0"], "--http-port"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_taken_port_is_one_clear_line(taken: int, command: list[str], flag: str) -> None:
    full = [sys.executable, "-m", "pagewire", *command, flag, str(taken), "--log-level=warning"]
    done = subprocess.run(full, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    name = Path("/proc/self/comm").read_text().strip()
    told = (
        rf"\S+ \S+ CRITICAL \S+ cannot listen on 127\.0\.0\.1:{taken}: port {taken} is taken by "
        rf"{re.escape(name)} \(process {os.getpid()}\); stop it, or choose another {flag}"
    )
    assert re.fullmatch(told + "\n", done.stderr), done.stderr


def test_other_reasons_have_their_own_words(taken: int) -> None:
    with pytest.raises(
        OSError, match=r"^cannot listen on 203\.0\.113\.7:1234: this machine has no such address; .*other --host$"
    ):
        check_port("203.0.113.7", 1234, "--port")
    with pytest.raises(
        OSError, match=r"^--health-host is 'no such name', which is no valid address \(.*other --health-host"
    ):
        check_port("no such name", 1234, "--health-port")
    with pytest.raises(OSError, match=r"^--host is '\.\.', which is no valid address"):
        check_port("..", 1234, "--port")
    for host in ("localhost", "0.0.0.0"):
        with pytest.raises(OSError, match=f"port {taken} is taken"):
            check_port(host, taken, "--port")


@pytest.mark.parametrize(
    ("bound", "tried", "is_named"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("::1", "::1", True),
        ("::", "127.0.0.1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("::1", "127.0.0.1.invalid", False),
    ],
)
def test_the_process_that_has_a_port_is_named(bound: str, tried: str, is_named: bool) -> None:
    code = (
        "import socket, sys; host, dual = sys.argv[1], sys.argv[1] in ('::', '::ffff:127.0.0.1')\n"
        "family = socket.AF_INET6 if ':' in host else socket.AF_INET\n"
        "with socket.create_server((host, 0), family=family, dualstack_ipv6=dual) as server:\n"
        "    open('/proc/self/comm', 'w').write('a\\tb')\n"
        "    print(server.getsockname()[1], flush=True); input()"
    )
    if ":" in bound and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    command = [sys.executable, "-c", code, bound]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert owner_of(tried, port) == (rf"a\tb (process {process.pid})" if is_named else "")
        process.communicate("\n")
    assert owner_of(tried, port) == ""


def test_this_process_is_not_named(taken: int) -> None:
    told = refusal(OSError(errno.EADDRINUSE, ""), "127.0.0.1", taken, "--http-port")
    assert str(told) == f"cannot listen on 127.0.0.1:{taken}: port {taken} is taken; choose another --http-port"


def test_a_port_of_the_system_is_refused() -> None:
    told = refusal(PermissionError(errno.EACCES, "Permission denied"), "127.0.0.1", 7, "--health-port")
    assert str(told) == "cannot listen on 127.0.0.1:7: this user may not use port 7; choose another --health-port"


async def test_a_server_listens_on_what_it_is_given() -> None:
    server = grpc.aio.server()
    port = listen(server, "127.0.0.1", 0, None, "--port")
    with pytest.raises(OSError, match=f"port {port} is taken"):
        listen(server, "127.0.0.1", port, None, "--port")
    await server.stop(0)


async def test_a_certificate_that_grpc_does_not_take_is_no_taken_port() -> None:
    authority = Authority("an authority")
    # Invalid files are refused when they are read. This is an invalid certificate that only gRPC detects.
    other, issued = authority.issue("localhost"), authority.issue("localhost")
    credentials = grpc.ssl_server_credentials([(other.key, issued.cert)])
    tls = cast(TlsFiles, SimpleNamespace(server_credentials=lambda: credentials))
    with pytest.raises(OSError, match=r"^cannot listen on 127\.0\.0\.1:0: gRPC does not support this certificate"):
        listen(create_server(), "127.0.0.1", 0, tls, "--port")


def test_a_port_whose_last_connection_has_just_ended_is_free() -> None:
    """A port is free although its last connection has just ended, as after a restart.

    The system keeps the connection in TIME_WAIT, and gRPC can still bind the port.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = listener.accept()
            served.close()  # the side that closes first enters TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    check_port("127.0.0.1", port, "--port")


def nices_of_pool() -> list[int]:
    nices = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # an idle pool thread may end at any time
            if "event" in (thread / "comm").read_text():
                nices.append(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return nices


async def test_grpc_pool_threads_have_lower_priority() -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    server = create_server()
    port = listen(server, "127.0.0.1", 0, None, "--port")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()  # so that the pool has run
        lower_grpc_pool_priority()
        nices = nices_of_pool()
    await server.stop(0)
    assert max(nices) >= 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


async def test_idle_connections_do_not_block_health_probes() -> None:
    answers, port = health.Health(create_server(), []), free_port("127.0.0.1")
    answers.listen("127.0.0.1", port)
    await answers.begin()
    with contextlib.ExitStack() as idle:
        for _ in range(health.MAX_PROBES + 4):
            connection = idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # an empty SETTINGS frame
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = health_pb2.HealthCheckRequest(service=health.LIVENESS)
            answer = await health_pb2_grpc.HealthStub(channel).Check(check, wait_for_ready=True, timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await answers.end()


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert join("::1", 7) == join("[::1]", 7) == "[::1]:7"
    assert join("node-1", 7) == "node-1:7"
