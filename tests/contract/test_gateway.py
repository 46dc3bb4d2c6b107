"""The flags of `pagewire serve --gateway`, and that the gateway's process never outlives its parent."""

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagewire.cli.command import main
from pagewire.hosting.gateway import GatewayConfig, gateway_command, level_of
from pagewire.hosting.supervisor import free_port
from tests.contract.scheduler_stack import make_checkpoint

SERVE = ["serve", "models/storyteller", "--gateway"]


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("grpc://127.0.0.1:50051", "grpc://127.0.0.1:50051"),
        ("grpc://0.0.0.0:50051", "grpc://127.0.0.1:50051"),
        ("grpc://[::]:7", "grpc://[::1]:7"),
        ("grpc://node-7:50051", "grpc://node-7:50051"),
    ],
)
def test_the_gateway_dials_the_scheduler(url: str, dialled: str) -> None:
    config = GatewayConfig(gateway=True, gateway_host="0.0.0.0", gateway_port=8000, gateway_metrics_port=29_000)
    flags = gateway_command(config, url, "info", lambda host: pytest.fail("the port is given"))
    assert f"--worker-urls={dialled}" in flags
    assert {"--host=0.0.0.0", "--port=8000", "--prometheus-host=127.0.0.1", "--prometheus-port=29000"} < set(flags)
    assert f"--prometheus-port={29_001}" in gateway_command(
        GatewayConfig(gateway=True), url, "debug", lambda host: 29_001
    )


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
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "smg" else find_spec(name))
    assert main([*SERVE, "--gateway-port", str(free_port("127.0.0.1"))]) == 2
    assert "pip install 'pagewire[gateway]'" in capsys.readouterr().err


def test_it_cannot_dial_a_scheduler_with_certificates(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port("127.0.0.1"))
    assert main([*SERVE, "--gateway-port", port, "--tls-cert", "a.pem", "--tls-key", "b.pem"]) == 2
    assert "--gateway and --tls-cert cannot go together" in capsys.readouterr().err


def test_it_ends_with_its_parent() -> None:
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    flags = [f"--port={port}", "--worker-urls=grpc://127.0.0.1:1", f"--prometheus-port={metrics_port}"]
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
        ("2026-11-22 15:12:50 ERROR smg::workflow: a.rs:372: Failed to load tokenizer", logging.ERROR),
        ("2026-11-22 15:12:50  INFO smg::server: a.rs:1: serving", logging.INFO),
        ("something that is no log line", logging.INFO),
    ],
)
def test_its_lines_keep_their_level_but_for_the_one_about_pictures(line: str, level: int) -> None:
    assert level_of(line) == level
