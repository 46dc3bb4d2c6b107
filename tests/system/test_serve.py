"""`pagewire serve` as a user runs it: real processes, a small random checkpoint."""

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire import Client, SamplingParams
from pagewire.common.wire.messages import PROTOCOL_VERSION
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from testing.checkpoints.families import make_checkpoint
from testing.services import Service
from testing.serving import hub
from tests.system.processes import command_line, wait_until_gone
from tests.thorough import thorough

READY = "ready on grpc://"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=20)


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `pagewire serve` on ports of its own. The server is killed at the end if it still runs."""
    base = ("--port=0", "--metrics-port=0", "--num-device-blocks=512", "--num-threads=1")
    command = [sys.executable, "-m", "pagewire", "serve", str(model), *base, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(process: "subprocess.Popen[str]") -> str:
    """Return the server's URL once it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(READY), line
    return line.strip().removeprefix("ready on ")


def worker_of(process: "subprocess.Popen[str]") -> int:
    """Return the process id of the only worker, after waiting for a worker that is starting."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if len(children) == 1 and "pagewire worker" in command_line(int(children[0])):
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("no worker was started within 30 s")


def status(url: str) -> str:
    """Return the output of `pagewire status`."""
    command = [sys.executable, "-m", "pagewire", "status", "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_stream_outlives_its_worker_and_a_signal_ends_both(model: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=300)
    with serving(model) as process:
        url = wait_until_ready(process)
        assert f", process {worker_of(process)} on " in status(url)
        with Client(url) as client:
            undisturbed = client.complete(prompt_token_ids=PROMPT, sampling=sampling)
            token_ids: list[int] = []
            for output in client.stream(prompt_token_ids=PROMPT, sampling=sampling):
                if len(token_ids) < 20 <= len(token_ids) + len(output.token_ids):
                    killed = worker_of(process)
                    os.kill(killed, signal.SIGKILL)
                token_ids += output.token_ids
        assert tuple(token_ids) == undisturbed.outputs[0].token_ids
        worker = worker_of(process)
        assert worker != killed
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out == ""
        assert "Traceback" not in err
        assert "options from flags: " in err
        wait_until_gone(worker)


@pytest.mark.thorough
def test_a_worker_that_hangs_is_replaced(model: Path) -> None:
    """A stopped process keeps its connection and sends nothing; it is never continued."""
    sampling = SamplingParams(temperature=0, max_tokens=300)
    with serving(model) as process:
        with Client(wait_until_ready(process)) as client:
            undisturbed = client.complete(prompt_token_ids=PROMPT, sampling=sampling)
            token_ids: list[int] = []
            for output in client.stream(prompt_token_ids=PROMPT, sampling=sampling):
                if len(token_ids) < 20 <= len(token_ids) + len(output.token_ids):
                    stopped = worker_of(process)
                    os.kill(stopped, signal.SIGSTOP)
                token_ids += output.token_ids
        assert tuple(token_ids) == undisturbed.outputs[0].token_ids
        assert worker_of(process) != stopped
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.mark.thorough
def test_a_worker_that_another_scheduler_takes_is_replaced(model: Path) -> None:
    """The stream continues, whether or not the other scheduler's epoch is refused."""
    sampling = SamplingParams(temperature=0, max_tokens=300)
    answers = []
    with serving(model) as process:
        with Client(wait_until_ready(process)) as client:
            undisturbed = client.complete(prompt_token_ids=PROMPT, sampling=sampling)
            token_ids: list[int] = []
            for output in client.stream(prompt_token_ids=PROMPT, sampling=sampling):
                if len(token_ids) < 20 <= len(token_ids) + len(output.token_ids):
                    taken = worker_of(process)
                    for epoch in (2**64 - 1, int((time.time() + 3600) * 1000) << 20):
                        answers.append(take(socket_of(taken), epoch))
                token_ids += output.token_ids
            assert client.complete(prompt_token_ids=PROMPT, sampling=sampling).outputs == undisturbed.outputs
        assert [answer.WhichOneof("body") for answer in answers] == ["refusal", "ready"]
        assert answers[0].refusal.reason == worker_pb2.Refusal.REASON_FUTURE_EPOCH
        assert tuple(token_ids) == undisturbed.outputs[0].token_ids
        assert worker_of(process) != taken
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert f"killing the worker, process {taken}: scheduler rogue has taken the worker in epoch" in err


def take(path: Path, epoch: int) -> worker_pb2.ExecuteResponse:
    """Send a Hello as a scheduler of this epoch would, and return the worker's response."""
    hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, instance_id="rogue", epoch=epoch, pipeline_depth=1)
    with grpc.insecure_channel("unix:" + quote(str(path))) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return next(stub.Execute(iter([worker_pb2.ExecuteRequest(hello=hello)]), timeout=60, wait_for_ready=True))


@pytest.mark.thorough
def test_a_worker_is_started_when_there_are_descriptors_again(model: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=300)
    with serving(model) as process:
        assert process.stderr is not None
        with Client(wait_until_ready(process)) as client:
            undisturbed = client.complete(prompt_token_ids=PROMPT, sampling=sampling)
            token_ids: list[int] = []
            for output in client.stream(prompt_token_ids=PROMPT, sampling=sampling):
                if len(token_ids) < 20 <= len(token_ids) + len(output.token_ids):
                    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
                    assert limits[0] == min(65_536, limits[1])
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
                    os.kill(worker_of(process), signal.SIGKILL)
                    while "Too many open files" not in process.stderr.readline():
                        assert process.poll() is None
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
                token_ids += output.token_ids
        assert tuple(token_ids) == undisturbed.outputs[0].token_ids
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in err


def test_a_killed_server_leaves_no_worker(model: Path) -> None:
    with serving(model) as process:
        worker = worker_of(process)
        process.kill()
        process.wait()
        wait_until_gone(worker)


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process listens on."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(entry))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def socket_of(worker: int) -> Path:
    [path] = [flag.partition("=")[2] for flag in command_line(worker).split() if flag.startswith("--socket=")]
    return Path(path)


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough(signal.SIGTERM)])
def test_only_its_user_reaches_the_worker(model: Path, number: signal.Signals) -> None:
    """The worker has no port, but a socket in a directory that is removed with the server."""
    with serving(model) as process:
        port = int(wait_until_ready(process).rpartition(":")[2])
        assert listening_ports(process.pid) == {port}
        worker = worker_of(process)
        assert listening_ports(worker) == set()
        path = socket_of(worker)
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert not path.parent.exists()


def test_a_scheduler_dials_a_worker_on_a_socket_and_shows_it_a_secret(model: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path, secret = f"{directory}/a worker", Path(directory) / "secret"
        secret.write_text("0123456789abcdef\n")
        link = ["--link-secret-file", secret]
        worker = Service("worker", [model, "--socket", path, *link, "--num-device-blocks=64", "--num-threads=1"])
        try:
            assert worker.next_line() == f"ready on unix:{path}"
            assert listening_ports(worker.pid) == set()
            with grpc.insecure_channel("unix:" + quote(path)) as channel:  # probes need no secret
                probed = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert probed.status == health_pb2.HealthCheckResponse.SERVING
            flags = [model, "--worker", f"unix:{path}", *link, "--port=0", "--metrics-port=0"]
            scheduler = Service("scheduler", flags)
            try:
                with Client(scheduler.wait_until_ready()) as client:
                    answer = client.complete(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=3))
                    assert len(answer.outputs[0].token_ids) == 3
            finally:
                scheduler.stop()
        finally:
            assert worker.stop() == 0
        assert not Path(path).exists()


def test_a_taken_port_is_a_clear_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with serving(model, f"--port={port}") as process:
            out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == ""
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "Traceback" not in err
    Path(runtime).rmdir()  # the folder is empty


def test_a_worker_that_cannot_start_ends_the_server(tmp_path: Path, model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with serving(tmp_path, "--log-level=warning") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 78
    assert out == ""
    [line] = err.splitlines()
    assert "model.safetensors is not a complete safetensors file" in line


def test_options_from_a_file_and_the_environment(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("block-size: 8\nmax_num_seqs: 4\nserved_model_name: file\n")
    environ = os.environ | {"PAGEWIRE_SERVED_MODEL_NAME": "environment", "PAGEWIRE_MAX_NUM_SEQS": "3"}
    flags = ["--config", str(file), "--max-num-seqs", "2", "--port=0", "--metrics-port=0", "--num-device-blocks=64"]
    command = [sys.executable, "-m", "pagewire", "serve", str(model), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            url = wait_until_ready(process)
            status = [sys.executable, "-m", "pagewire", "status", "--json", "--url", url]
            printed = subprocess.run(status, capture_output=True, text=True, check=True)
        finally:
            process.terminate()
        assert process.wait(30) == 0
    info = json.loads(printed.stdout)["info"]
    assert (info["served_model_name"], info["max_num_seqs"]) == ("environment", 2)
    assert (info["worker"]["block_size"], info["worker"]["num_device_blocks"]) == (8, 64)


@pytest.mark.thorough
def test_a_model_of_the_hub(model: Path, tmp_path: Path) -> None:
    """The model is downloaded once, and then served without the hub, under its id, by both services."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_HOME": str(tmp_path), "PAGEWIRE_REVISION": "main"}
    made = hub.Hub({"org/tiny": hub.Repository({**files, "pytorch_model.bin": b"pickled"})})
    command = [sys.executable, "-m", "pagewire", "serve", "org/tiny", "--port=0", "--metrics-port=0"]
    with hub.serving(made) as url:
        first = served_once(command, environ | {"HF_ENDPOINT": url})
    assert set(made.downloaded) == set(files)
    second = served_once(command, environ | {"HF_ENDPOINT": url})
    assert first == second == ("org/tiny", 1)


def served_once(command: list[str], environ: dict[str, str]) -> tuple[str, int]:
    """Return the model's name and the number of tokens of one completion."""
    with subprocess.Popen([*command, "--num-threads=1"], stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            with Client(wait_until_ready(process)) as client:
                completed = client.complete(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1))
                status = [sys.executable, "-m", "pagewire", "status", "--json", "--url", client.url]
                printed = subprocess.run(status, capture_output=True, text=True, check=True)
        finally:
            process.terminate()
        assert process.wait(30) == 0
    return json.loads(printed.stdout)["info"]["served_model_name"], len(completed.outputs[0].token_ids)
