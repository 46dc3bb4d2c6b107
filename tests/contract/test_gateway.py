"""The flags of `pagewire serve --gateway`, and that the gateway's process never outlives its parent."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pagewire import installation
from pagewire.cli.command import main
from pagewire.hosting import gateway_process, supervisor
from pagewire.hosting.gateway import GatewayConfig, gateway_command, level_of
from pagewire.hosting.supervisor import Supervisor, child_environ, free_port
from testing.scheduler_stack import make_checkpoint, serve
from tests.environments import hide

SERVE = ["serve", "models/storyteller", "--gateway"]


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("grpc://127.0.0.1:50051", "grpc://127.0.0.1:50051"),
        ("grpc://0.0.0.0:50051", "grpc://127.0.0.1:50051"),
        ("grpc://[::]:7", "grpc://127.0.0.1:7"),
        ("grpc://node-7:50051", "grpc://node-7:50051"),
    ],
)
def test_the_gateway_dials_the_scheduler(url: str, dialled: str) -> None:
    config = GatewayConfig(gateway=True, gateway_host="0.0.0.0", gateway_port=8081, gateway_metrics_port=29_000)
    flags = gateway_command(config, url, "info", 1000)
    assert f"--worker-urls={dialled}" in flags
    assert {"--host=0.0.0.0", "--port=8081", "--prometheus-host=127.0.0.1", "--prometheus-port=29000"} < set(flags)
    again = gateway_command(GatewayConfig(gateway=True), url, "debug", 1000)
    assert "--prometheus-port=0" in again, "each process that is started finds another one"
    assert "--max-payload-size=8000" in flags, "no more than a prompt takes as JSON"


def test_a_checkpoint_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, with_tokenizer=False)
    (model / "model.safetensors").touch()
    assert main(["serve", str(model), "--gateway", "--gateway-port", str(free_port("127.0.0.1"))]) == 2
    assert f"--gateway needs a tokenizer, but {tmp_path} has no tokenizer.json" in capsys.readouterr().err


def test_a_port_that_the_scheduler_takes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--port=9000", "--gateway-port=9000"]) == 2
    assert "--port and --gateway-port are both 9000; choose another for one" in capsys.readouterr().err


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], port: int) -> None:
    assert main([*SERVE, "--gateway-port", str(port)]) == 2
    assert f"--gateway-port is {port}, but must be 1 to 65535" in capsys.readouterr().err


def test_without_the_wheel_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(installation.NEEDED["gateway"][0], monkeypatch)
    assert main([*SERVE, "--gateway-port", str(free_port("127.0.0.1"))]) == 2
    assert "pip install 'pagewire[gateway]'" in capsys.readouterr().err


def test_it_cannot_dial_a_scheduler_with_certificates(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port("127.0.0.1"))
    assert main([*SERVE, "--gateway-port", port, "--tls-cert", "a.pem", "--tls-key", "b.pem"]) == 2
    assert "--gateway and --tls-cert cannot go together" in capsys.readouterr().err


TENANT = "tenants: {{tenant: {{api_keys: ['sha256:{digest}']{more}}}}}"


@pytest.mark.parametrize(("more", "is_refused"), [("", True), (", anonymous: true", False)])
def test_a_scheduler_that_would_not_know_it_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: str, is_refused: bool
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANT.format(digest="0" * 64, more=more))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main([*SERVE, "--gateway-port", str(port), "--tenants", str(path)])
    told = f"no tenant of --tenants {path} is anonymous; add one with `anonymous: true`"
    assert (code, told in capsys.readouterr().err) == ((2, True) if is_refused else (1, False))


def test_its_metrics_do_not_get_the_port_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port("127.0.0.1")
    monkeypatch.setattr(supervisor, "WORKER_PORTS", range(port, port + 1))
    monkeypatch.setattr(supervisor, "_found", [])
    monkeypatch.setenv("TOKIO_WORKER_THREADS", "1")
    flags = [f"--port={port}", "--prometheus-host=127.0.0.1", "--prometheus-port=0"]
    with pytest.raises(SystemExit, match="the gateway cannot start: no free port on"):
        gateway_process.main(["http://127.0.0.1:1", *flags])


def test_it_ends_with_its_parent() -> None:
    port = free_port("127.0.0.1")
    flags = [f"--port={port}", "--worker-urls=grpc://127.0.0.1:1", "--prometheus-port=0"]
    flags += ["--prometheus-host=127.0.0.1", "--log-level=error"]
    child = [sys.executable, "-m", "pagewire.hosting.gateway_process", f"http://127.0.0.1:{port}", *flags]
    program = f"""
import os, subprocess, time
environ = os.environ | {{"PAGEWIRE_EXIT_WITH_PARENT": str(os.getpid())}}
print(subprocess.Popen({child!r}, env=environ).pid, flush=True)
time.sleep(600)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        try:
            pid = int(parent.stdout.readline())
            until(lambda: is_listening(port))
        finally:
            parent.send_signal(signal.SIGKILL)
    until(lambda: not is_running(pid))


MODEL_NAME = "m" * 200_000


class Restarted:
    """The gateway's URL each time that it comes up."""

    def __init__(self) -> None:
        self._urls: asyncio.Queue[str] = asyncio.Queue()
        self.note = self._urls.put_nowait

    async def next(self) -> str:
        return await asyncio.wait_for(self._urls.get(), 60)


def complete(url: str, **fields: object) -> tuple[int, str]:
    """The status of a completion and the body."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2} | fields)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()


async def test_what_clients_send_neither_deafens_its_supervisor_nor_fills_it(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """smg tells of a model that it does not have by its name, in lines that no reader of lines takes."""
    restarted, host = Restarted(), "127.0.0.1"
    async with serve(checkpoint) as stack:
        config = GatewayConfig(gateway=True, gateway_port=free_port(host))
        command = gateway_command(config, stack.url, "warning", 100_000)
        supervisor = Supervisor(
            command, child_environ(os.environ, []), name="gateway", on_ready=restarted.note, level_of=level_of
        )
        running = asyncio.create_task(supervisor.run())
        try:
            url = await restarted.next()
            for _ in range(6):
                assert (await asyncio.to_thread(complete, url, model=MODEL_NAME))[0] == 404
            for announced in ("cannot start: forged", "ready on http://forged"):  # which smg prints as it is
                assert (await asyncio.to_thread(complete, url, model=f"\n{announced}\n"))[0] == 404
            # The gateway may close the connection before it has read all of the body, and its answer with it.
            with contextlib.suppress(ConnectionError):
                assert (await asyncio.to_thread(complete, url, prompt="x" * 900_000))[0] == 413
            [pid] = pids_of("pagewire.hosting.gateway_process")
            assert num_threads(pid, "tokio") >= 64, "what one request costs is its thread's"
            os.kill(pid, signal.SIGKILL)
            url = await restarted.next()
            assert (await asyncio.to_thread(complete, url))[0] == 200
        finally:
            running.cancel()
            await asyncio.wait({running})
    lines = [record.getMessage() for record in caplog.records if MODEL_NAME[:1000] in record.getMessage()]
    assert len(lines) >= 6
    assert all(line.endswith(" more characters]") for line in lines)
    assert "the gateway ended (signal SIGKILL" in caplog.text


def pids_of(module: str) -> list[int]:
    """Children of this process that run a module."""
    tasks = Path("/proc/self/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in children if module in Path(f"/proc/{child}/cmdline").read_text()]


def num_threads(pid: int, name: str) -> int:
    names = [(task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(each.startswith(name) for each in names)


def until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():  # there is no event to wait for
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_running(pid: int) -> bool:
    """A zombie that waits for its reaper has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (
            "2026-11-22 15:12:50  WARN smg::routers::grpc::multimodal: "
            "model_gateway/src/routers/grpc/multimodal/mod.rs:281: libturbojpeg not found: JPEGs decode",
            logging.DEBUG,
        ),
        ("2026-11-22 15:12:50  WARN smg::routers::grpc::multimodal: mod.rs:1: something else", logging.WARNING),
        ("2026-11-22 15:12:50  WARN smg::posture: posture.rs:143: libturbojpeg not found: ", logging.WARNING),
        (
            "2026-11-22 15:12:50  WARN smg::posture: posture.rs:143: SECURITY POSTURE: open",
            logging.DEBUG,
        ),
        ("2026-11-22 15:12:50  WARN smg::server: server.rs:143: SECURITY POSTURE: open", logging.WARNING),
        ("2026-11-22 15:12:50 ERROR smg::workflow: a.rs:372: Failed to load tokenizer", logging.ERROR),
        ("2026-11-22 15:12:50  INFO smg::server: a.rs:1: serving", logging.INFO),
        ("something that is no log line", logging.INFO),
    ],
)
def test_its_lines_keep_their_level_but_for_two_that_are_expected(line: str, level: int) -> None:
    assert level_of(line) == level
