"""Permanent errors of `pagewire serve` and `pagewire worker`: each is reported once, in one line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.checkpoints.families import make_checkpoint
from testing.forked import ForkedProcess
from tests.environments import forgetting

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
EXIT_REFUSED = 78
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
# Python imports a module named sitecustomize automatically, before anything else.
WITHOUT_TORCH = """
import sys


class Hiding:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = name.partition(".")[0] in ("torch", "safetensors")
        return None if is_hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def edit(**fields: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


# The fault of the checkpoint, the flags, and the text of the line.
KNOWN_BEFORE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "architecture": (edit(architectures=["MambaForCausalLM"]), [], "architecture MambaForCausalLM is not supported"),
    "no architecture": (edit(architectures=[{}]), [], "architectures is [{}], but must be a list of names"),
    "quantised": (edit(quantization_config={"quant_method": "hqq"}), [], "the weights are codes of HQQ (hqq)"),
    "quantised already": (
        edit(quantization_config={"quant_method": "fp8"}),
        ["--quantization=int8"],
        "is quantised already (fp8); leave it out",
    ),
    "pickled": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        [],
        "only pickled weights (pytorch_model.bin), which can run any code and are never loaded: convert them",
    ),
    "cut off": (cut, [], "model.safetensors is not a complete safetensors file"),
    "layers": (edit(num_hidden_layers=10**9), [], "num_hidden_layers is 1000000000, but must be a whole number"),
    "vocabulary": (edit(vocab_size=2**31), [], "vocab_size is 2147483648, but must be"),
    "positions": (edit(max_position_embeddings=2**40), [], "max_position_embeddings is 1099511627776, but must be"),
    "not JSON": (lambda path: (path / "config.json").write_bytes(b"\xff{"), [], "config.json is not JSON: 'utf"),
    "length": (lambda path: None, ["--max-model-len=5000"], "--max-model-len is 5000; the checkpoint has 1024"),
    "too large": (edit(**LLAMA_70B), ["--load-format=dummy"], "its weights take at least 131."),
}  # fmt: skip
KNOWN_TO_TORCH: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "shape": (edit(vocab_size=150), [], "has shape [151, 64], expected [150, 64] from config.json"),
    "pool": (
        lambda path: None,
        ["--num-device-blocks=2000000000"],
        "--num-device-blocks is 2000000000: 2000000000 blo",
    ),
    "bytes": (
        lambda path: None,
        ["--kv-cache-memory=900TiB", "--max-num-seqs=65536", "--max-num-batched-tokens=65536"],
        "--kv-cache-memory is 900TiB: 4194304 blocks take",
    ),
    "swap space": (lambda path: None, ["--swap-space=900TiB"], "--swap-space is 900TiB, which takes"),
}
if not torch.cuda.is_available():
    KNOWN_TO_TORCH["no GPU"] = (lambda path: None, ["--device=cuda"], "--device is cuda, but torch finds no GPU")
ALL = KNOWN_BEFORE | KNOWN_TO_TORCH


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sound"), "llama", seed=3)


BASE = ("--port=0", "--device=cpu", "--num-threads=1", "--log-level=info")


def run(verb: str, model: Path, flags: list[str], **environ: str) -> "subprocess.CompletedProcess[str]":
    place = [str(model), "--metrics-port=0"] if verb == "serve" else [f"--model={model}"]
    command = [sys.executable, "-m", "pagewire", verb, *place, *BASE, *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environ}
    )


def refusals(stderr: str) -> list[str]:
    """Return the lines that state why a process ends. The checkpoint has no tokenizer, which causes a warning."""
    return [line for line in stderr.splitlines() if " INFO " not in line and " WARNING " not in line]


@pytest.mark.parametrize(
    ("name", "verb"), [(name, verb) for name in (*KNOWN_BEFORE, "pool") for verb in ("serve", "worker")]
)
def test_refusal_is_one_line_with_its_own_exit_code(sound: Path, tmp_path: Path, name: str, verb: str) -> None:
    change, flags, expected = ALL[name]
    model, log = tmp_path / "model", tmp_path / "termination-log"
    shutil.copytree(sound, model)
    change(model)
    log.touch()
    ended = run(verb, model, flags, PAGEWIRE_TERMINATION_LOG=str(log))
    assert ended.returncode == EXIT_REFUSED, ended.stderr
    assert ended.stdout == ""
    [line] = refusals(ended.stderr)
    assert " CRITICAL " in line
    assert expected in line
    assert line.endswith(log.read_text().strip())
    if name in KNOWN_BEFORE:
        assert "is process" not in ended.stderr, "no worker was started"
    elif verb == "serve":
        assert ended.stderr.count("the worker is process") == 1


@pytest.mark.parametrize("name", KNOWN_TO_TORCH)
def test_a_worker_says_what_torch_alone_knows(sound: Path, tmp_path: Path, name: str) -> None:
    """`serve` forwards any such line in the same way as the line about the pool."""
    change, flags, expected = ALL[name]
    model, log = tmp_path / "model", tmp_path / "log"
    shutil.copytree(sound, model)
    change(model)
    worker = ForkedProcess(["worker", f"--model={model}", *BASE, *flags], log)
    assert (worker.wait(120), worker.stdout.read()) == (EXIT_REFUSED, ""), log.read_text()
    [line] = refusals(log.read_text())
    assert " CRITICAL " in line
    assert expected in line


@pytest.mark.parametrize("name", ["architecture", "pool"])
def test_supervised_server_reports_refusal_on_standard_output(sound: Path, tmp_path: Path, name: str) -> None:
    change, flags, expected = ALL[name]
    model = tmp_path / "model"
    shutil.copytree(sound, model)
    change(model)
    ended = run("serve", model, flags, PAGEWIRE_EXIT_WITH_PARENT=str(os.getpid()))
    assert ended.returncode == EXIT_REFUSED
    assert refusals(ended.stderr) == []
    [line] = ended.stdout.splitlines()
    assert line.startswith("cannot start: ")
    assert expected in line


@pytest.mark.parametrize("verb", ["serve", "worker"])
def test_without_torch_it_says_what_to_install(sound: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH + forgetting("torch", "safetensors"))
    ended = run(verb, sound, [], PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (ended.returncode, ended.stdout) == (EXIT_REFUSED, "")
    [line] = refusals(ended.stderr)
    assert f"pagewire {verb} cannot run here: torch is not installed, safetensors is not installed: " in line
    assert f"-m pip install 'pagewire[{verb}]'" in line


def test_ranks_say_it_once(sound: Path) -> None:
    ended = run("serve", sound, ["--tensor-parallel-size=2", "--num-device-blocks=2000000000"])
    assert (ended.returncode, ended.stdout) == (EXIT_REFUSED, "")
    [line] = refusals(ended.stderr)
    assert "cannot start: --num-device-blocks is 2000000000" in line
    ended = run("serve", sound, ["--tensor-parallel-size=3"])
    [line] = refusals(ended.stderr)
    assert "--tensor-parallel-size is 3; for this model it must divide the 4 attention heads" in line
