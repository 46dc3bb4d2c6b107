"""Both services from a source tree, on a machine with torch and grpcio but without the optional packages."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.client.errors import InvalidRequest
from testing.checkpoints.families import make_checkpoint
from testing.services import Process, running
from tests.environments import forgetting

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "smg",
    "smg_grpc_proto",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "google.rpc",
    "google.api",
    "opentelemetry",
    "matplotlib",
    "pytest_asyncio",
    "pytest_timeout",
    "hypothesis",
)
# Python imports a module with this name automatically, before anything else. It hides the packages.
SITECUSTOMIZE = f"""
import sys


class Hiding:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = any(name == hidden or name.startswith(hidden + ".") for hidden in {OPTIONAL})
        return None if is_hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment variables of such a machine."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(
        SITECUSTOMIZE + forgetting("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc")
    )
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_the_packages_are_hidden(bare: dict[str, str]) -> None:
    program = f"""
import importlib.util, sys
import google.protobuf, grpc
for name in {[name for name in OPTIONAL if "." not in name]}:
    assert importlib.util.find_spec(name) is None, name
try:
    import google.rpc
except ImportError:
    sys.exit(0)
sys.exit("google.rpc is there")
"""
    subprocess.run([sys.executable, "-c", program], env=bare, cwd="/", check=True)


async def test_both_services_serve_without_them(bare: dict[str, str], tmp_path: Path) -> None:
    def start(arguments: Sequence[str]) -> Process:
        command = [sys.executable, "-m", "pagewire", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=bare, cwd=tmp_path)

    model = make_checkpoint(tmp_path / "model", "llama", seed=1)
    with running(model, start=start) as system:
        async with AsyncClient(system.url) as client:
            sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            completion = await client.complete(None, sampling, prompt_token_ids=[1, 2, 3])
            assert len(completion.outputs[0].token_ids) == 5
            with pytest.raises(InvalidRequest, match="the token id 9999, but must be from 0 to"):
                await client.complete(None, sampling, prompt_token_ids=[9999])


@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_tracing_that_cannot_be_had_is_a_clear_error(bare: dict[str, str], tmp_path: Path, service: str) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", seed=1)
    command = [sys.executable, "-m", "pagewire", service, "--model", str(model), "--port", "0"]
    command += ["--otlp-traces-endpoint", "http://127.0.0.1:4317"]
    ended = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 78
    (line,) = [line for line in ended.stderr.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert "--otlp-traces-endpoint needs OpenTelemetry, but opentelemetry-sdk is not installed, " in line
    assert line.endswith("-m pip install 'pagewire[tracing]'")


@pytest.mark.parametrize("command", ["tests.gpu.check", "tests.gpu.check_kernels", "bench speed", "bench kernels"])
def test_commands_for_a_gpu_need_none_of_them(bare: dict[str, str], command: str) -> None:
    asked = [sys.executable, "-m", *command.split(), "--help"]
    helped = subprocess.run(asked, env=bare, cwd=ROOT, capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "--device" in helped.stdout
