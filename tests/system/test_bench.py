"""`pagewire bench`, which starts both services itself: real processes, a small random checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.checkpoints.families import make_checkpoint
from testing.kernels.compiler import skip_without_compiler
from testing.services import children_of

pytestmark = pytest.mark.thorough

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
LENGTHS = ("--input-len", "20", "--output-len", "12")
SERVE_FLAGS = ("--", "--num-threads", "1", "--num-device-blocks", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=21))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pagewire", "bench", *arguments]


# The parts that the worker reports where all layers are one call. The activation is included in the matrix
# multiplications.
PARTS = (
    "plan into the table of rows",
    "batch and attention's preparation",
    "matrix products",
    "attention",
    "norms and residual",
    "rotary embedding and cache write",
    "rest of the model",
    "head (logits)",
    "sampling",
)


def share(line: str) -> float:
    """Return the percentage in a row."""
    return float(line.split()[-1])


def test_throughput(model: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    flags = ["--num-prompts", "8", "--random-range-ratio", "0.5", "--output-json", str(path)]
    arguments = command("throughput", "--model", model, *LENGTHS, *flags, *SERVE_FLAGS)
    printed = subprocess.run(arguments, env=ENVIRON, capture_output=True, text=True, check=True, timeout=120)
    assert printed.stdout.startswith("Throughput: ")
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["failed"]) == (8, 0)
    assert result["worker"]["num_device_blocks"] == 256


def test_profile(model: str) -> None:
    skip_without_compiler()
    flags = ["--num-iters", "3", "--num-iters-warmup", "1", "--profile"]
    arguments = command("latency", "--model", model, *LENGTHS, *flags, *SERVE_FLAGS)
    environ = {**ENVIRON, "PAGEWIRE_CPU_KERNELS": "require"}
    printed = subprocess.run(arguments, env=environ, capture_output=True, text=True, check=True, timeout=120)
    lines = printed.stdout.split("\n")
    assert [line.split("  ")[1] for line in lines if line.startswith("  ")] == [
        "worker (1 step)",
        "queue, scheduler and wire to the worker",
        "request in, token out",
        "at the client",
        "worker step",
        "scheduler and wire between steps",
        "delivery to the client",
        "at the client",
        *PARTS,
        "steps",
        *PARTS,
        "step",
    ]
    step, client = (float(lines[i].split()[-2]) for i in (14, 17))
    assert step > 0
    assert client > 0
    for title in ("A prompt on the worker", "A decode step on the worker"):
        [place] = [number for number, line in enumerate(lines, 1) if line.startswith(title)]
        assert sum(share(line) for line in lines[place : place + len(PARTS)]) == pytest.approx(100.0, abs=5.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_goes_with_the_benchmark(model: str, number: signal.Signals) -> None:
    arguments = command("latency", "--model", model, *LENGTHS, "--num-iters", "100000", *SERVE_FLAGS)
    with subprocess.Popen(arguments, env=ENVIRON, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("ready on grpc://"):
            assert line, "it ended"
        [server] = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert not Path(f"/proc/{server}").exists()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    arguments = command("throughput", "--model", str(tmp_path / "none"), *LENGTHS)
    printed = subprocess.run(arguments, env=ENVIRON, capture_output=True, text=True, check=False, timeout=120)
    assert printed.returncode == 1
    assert printed.stdout == ""
    assert "Traceback" not in printed.stderr
    assert "none ended with exit code 78" in printed.stderr.splitlines()[-1]
    assert "there is no directory" in printed.stderr.splitlines()[-1]
