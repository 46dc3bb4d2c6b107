"""Links between services use an HTTP proxy only if a flag enables it, and client errors name the failing proxy."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

import pagewire
from pagewire import AsyncClient, Client, SamplingParams
from pagewire.common.wire.transport.http_proxy import http_proxy_of
from scheduler_service import front_end
from scheduler_service.config import FrontEndConfig
from testing.scheduler_stack import expected_tokens, serve
from tests.contract.raw_port import listener

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=8)
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class HttpProxy:
    """A proxy that forwards every CONNECT to the same port of this machine, whatever the host."""

    def __init__(self) -> None:
        self.connected: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.connected.append(head.split()[1].decode())
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.connected[-1].split(":")[-1])
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(pump(reader, target_writer), pump(target_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    finally:
        writer.close()


@asynccontextmanager
async def proxying() -> AsyncIterator[HttpProxy]:
    proxy = HttpProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


@contextmanager
def dead_port() -> Iterator[str]:
    """Yield a reserved address at which no process listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@asynccontextmanager
async def stack_of_three(checkpoint: Path, *, uses_proxy: bool) -> AsyncIterator[AsyncClient]:
    """Start a worker, a scheduler and a front end. Yield a client of the front end."""
    async with serve(checkpoint, worker_http_proxy=uses_proxy) as stack:
        config = FrontEndConfig(
            scheduler=stack.url.removeprefix("grpc://"),
            model=str(checkpoint),
            port=0,
            metrics_port=0,
            scheduler_http_proxy=uses_proxy,
        )
        stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
        running = asyncio.create_task(front_end.run(config, stop=stop, ready=url.set_result))
        try:
            async with AsyncClient(await asyncio.wait_for(url, 60)) as client:
                yield client
        finally:
            stop.set()
            await running


async def tokens_of(client: AsyncClient) -> list[int]:
    completion = await client.complete(prompt_token_ids=PROMPT, sampling=SAMPLING, timeout=60)
    return list(completion.outputs[0].token_ids)


async def test_links_pass_a_proxy_by(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxying() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with stack_of_three(checkpoint, uses_proxy=False) as client:
            assert await tokens_of(client) == expected_tokens(PROMPT, 8)
        assert proxy.connected == []


async def test_links_need_no_proxy_that_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_port() as nobody:
        monkeypatch.setenv("https_proxy", f"http://{nobody}")
        async with stack_of_three(checkpoint, uses_proxy=False) as client:
            assert await tokens_of(client) == expected_tokens(PROMPT, 8)


async def test_flags_lead_links_through_a_proxy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxying() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with stack_of_three(checkpoint, uses_proxy=True) as client:
            assert await tokens_of(client) == expected_tokens(PROMPT, 8)
        assert len(set(proxy.connected)) == 2  # the links to the worker and to the scheduler


async def test_a_client_goes_through_a_proxy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxying() as proxy, serve(checkpoint) as stack:
        monkeypatch.setenv("http_proxy", proxy.url)
        address = "scheduler.example:" + stack.url.rpartition(":")[2]
        async with AsyncClient(address) as client:
            assert await tokens_of(client) == expected_tokens(PROMPT, 8)
        assert proxy.connected == [address]


def refuse(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def hang_up(connection: socket.socket) -> None:
    connection.recv(65536)


def say_welcome(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>Please log in</html>")
    connection.recv(65536)


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
async def test_a_client_names_the_proxy_that_is_not_there(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_port() as nobody:
        monkeypatch.setenv(variable, f"http://somebody:secret@{nobody}")
        async with AsyncClient("grpc://scheduler.example:50051") as client:
            with pytest.raises(pagewire.Unavailable) as caught:
                await client.info()
        text = str(caught.value)
    hint = "no server answers at grpc://scheduler.example:50051 (`pagewire serve MODEL` starts one): "
    advice = f", through {variable} http://{nobody}; set no_proxy=scheduler.example to connect without the proxy"
    assert text.startswith(hint), text
    assert text.endswith(advice), text
    reason = text.removeprefix(hint).removesuffix(advice)
    assert reason.startswith("failed to connect to all addresses; last error: "), text
    assert nobody in reason, text
    assert "Connection refused" in reason, text
    assert "secret" not in text


async def test_a_client_names_a_proxy_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    async with AsyncClient("scheduler.example:50051") as client:
        with pytest.raises(pagewire.Unavailable, match=r"through http_proxy http://proxy\.invalid:3128; set no_proxy="):
            await client.info()


@pytest.mark.parametrize("behave", [refuse, hang_up, say_welcome])
def test_a_client_names_the_proxy_that_fails(behave, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(behave) as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")
        told = pytest.raises(pagewire.PagewireError, match=f"through http_proxy http://{address}; set no_proxy=")
        with Client("scheduler.example:50051") as client, told:
            client.complete("Once")


def test_a_client_names_the_proxy_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(say_nothing) as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")
        told = pytest.raises(pagewire.DeadlineExceeded, match=f"through http_proxy http://{address}; set no_proxy=")
        with Client("scheduler.example:50051") as client, told:
            client.complete("Once", timeout=0.1)


async def test_what_a_server_says_names_no_proxy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxying() as proxy, serve(checkpoint) as stack:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with AsyncClient("scheduler.example:" + stack.url.rpartition(":")[2]) as client:
            with pytest.raises(pagewire.InvalidRequest) as caught:
                await client.complete("Once", max_tokens=-1)
            assert "proxy" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "LOCALHOST:1",
        "grpc://localhost:1",
        "dns:///localhost:1",
        "dns:localhost:1",
        "a.localhost:1",
        "127.0.0.1:1",
        "127.1:1",
        "ipv4:127.0.0.1:1",
        "0.0.0.0:1",
        "[::1]:1",
        "ipv6:[::1]:1",
        "[::ffff:127.0.0.1]:1",
        "[::]:1",
        "unix:/tmp/scheduler",
        "unix-abstract:scheduler",
    ],
)
def test_this_machine_is_reached_without_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert http_proxy_of(address) is None
    assert http_proxy_of("grpc://scheduler.example:1").host == "scheduler.example"


@pytest.mark.parametrize(
    ("variables", "proxied"),
    [
        ({}, ()),
        ({"http_proxy": ""}, ()),
        ({"http_proxy": "https://proxy:3128"}, ()),  # gRPC ignores a proxy scheme that it does not support
        ({"http_proxy": "proxy:3128"}, ()),
        ({"http_proxy": "http://[::1"}, ()),
        ({"grpc_proxy": "", "http_proxy": "http://proxy:3128"}, ()),
        ({"http_proxy": "http://proxy:3128"}, ("a.example", "b.test", "10.1.2.3", "fd00::1")),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, ()),
        ({"http_proxy": "http://proxy:3128", "no_proxy": " .EXAMPLE ,10.0.0.0/8"}, ("b.test", "fd00::1")),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "b.test,fd00::/8,"}, ("a.example", "10.1.2.3")),
        (
            {"http_proxy": "http://proxy:3128", "no_grpc_proxy": "b.test", "no_proxy": "*"},
            ("a.example", "10.1.2.3", "fd00::1"),
        ),
    ],
)
def test_variables_say_what_is_proxied(
    variables: dict[str, str], proxied: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    addresses = {"a.example": "a.example:1", "b.test": "b.test:1", "10.1.2.3": "10.1.2.3:1", "fd00::1": "[fd00::1]:1"}
    assert tuple(host for host, address in addresses.items() if http_proxy_of(address)) == proxied
