"""The memory use of a model, which is known before loading and exact afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.network.operations import QkNormRopeStore, num_elements
from pagewire.network.rewrites import cut, tied
from pagewire.network.source import load_config
from testing.checkpoints.families import FAMILIES, make_checkpoint
from testing.checkpoints.gguf_files import write_gguf
from testing.kernels.compiler import skip_without_compiler
from testing.models import load_model
from worker_service.host.cpu_decoder import CpuDecoder
from worker_service.host.cpu_operations import CpuProduct, create_host_operations
from worker_service.models.decoder import Decoder
from worker_service.models.linear import Linear
from worker_service.models.loading import prepare_model
from worker_service.startup.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
MIB = 1 << 20
BIASES = {"attention_bias": True, "mlp_bias": True}


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {"tie_word_embeddings": is_tied}) for family in FAMILIES for is_tied in (True, False)),
        ("llama", BIASES),
        ("qwen3", {"attention_bias": True, "head_dim": 40}),
        ("qwen2", {"vocab_size": 149, "num_key_value_heads": 1}),
        ("gpt2", {"n_inner": 96}),
    ],
)  # fmt: skip
def test_arithmetic_counts_what_the_model_is_made_of(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path, family, seed=1, **overrides)
    network = load_config(path)
    for rank, num_ranks in ((0, 1), (0, 2), (1, 2), (0, 4), (3, 4)):
        unloaded = prepare_model(path, dtype=torch.float32, device=CPU, communicator=Rank(rank, num_ranks))
        built = [*unloaded.model.parameters(), *unloaded.model.buffers()]
        listed = tied(network.operations) if network.tie_word_embeddings else network.operations
        listed = cut(listed, rank, num_ranks)
        assert 4 * num_elements(listed) == sum(tensor.nbytes for tensor in built)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_loaded_model_holds_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, is_tied: bool, held: str, mode: str
) -> None:
    """oneDNN's packed weights cannot be inspected; they are as large as the weight."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", mode)
    path = make_checkpoint(tmp_path, family, seed=1, dtype=held, tie_word_embeddings=is_tied, vocab_size=160)
    unloaded = prepare_model(
        path, dtype=torch.float32, device=CPU, operations=create_host_operations(load_cpu_kernels())
    )
    footprint = unloaded.footprint()
    weights = {id(module): module.weight.nbytes for module in unloaded.model.modules() if _has_weight(module)}
    model = unloaded.load()
    actual = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    for module in model.modules():
        if isinstance(module, Linear):
            is_ours = isinstance(module.product, CpuProduct)
            actual += module.product.packed.panels.nbytes if is_ours else weights[id(module)]
    assert footprint.held == actual
    assert footprint.held <= footprint.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_decoder_reads_the_tables_of_angles_that_were_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    kernels = load_cpu_kernels()
    path = make_checkpoint(tmp_path, "qwen3", seed=1)
    model = load_model(path, dtype=dtype, device=CPU, operations=create_host_operations(kernels))
    assert isinstance(model, Decoder)
    assert kernels is not None
    counted = {buffer.data_ptr() for buffer in model.buffers()}
    turns = [turn for turn in CpuDecoder(model, kernels)._kernel._model if isinstance(turn, QkNormRopeStore)]
    read = {table.data_ptr() for turn in turns for table in turn.rope}
    assert read == counted
    assert {rows.dtype for rope in model.ropes for rows in rope(torch.arange(3))} == {dtype}


@pytest.mark.parametrize(
    ("held", "computed", "described"),
    [
        ("bfloat16", torch.float32, "bfloat16"),
        ("float32", torch.float32, "float32"),
        ("Q8_0", torch.bfloat16, "codes of 8 bits"),
    ],
)
def test_weight_dtype_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str, computed: torch.dtype, described: str
) -> None:
    """The dtype of the weights is reported; it may differ from the dtype of the computation."""
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "require")
    is_gguf = held == "Q8_0"
    path = make_checkpoint(
        tmp_path / "model", "qwen3", seed=1, dtype="float32" if is_gguf else held, tie_word_embeddings=True
    )
    path = write_gguf(tmp_path / "model.gguf", path, held) if is_gguf else path
    unloaded = prepare_model(path, dtype=computed, device=CPU, operations=create_host_operations(load_cpu_kernels()))
    assert unloaded.describe_dtypes() == described


def _has_weight(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear) and module.weight is not None


# Reads lines that describe measurements, and measures each in a copy of itself: importing torch takes longer than most
# of the measurements.
MEASURE = """
import ctypes, json, os, sys, torch
from pathlib import Path
from worker_service.models.loading import prepare_model
from worker_service.host.cpu_operations import create_host_operations
from worker_service.startup.cpu_kernels import load_cpu_kernels

def peak():
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])

def measure(folder, mode, quantization):
    os.environ["PAGEWIRE_CPU_KERNELS"] = mode
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "is_dummy": True}
    options["operations"] = create_host_operations(load_cpu_kernels())
    if quantization:  # or glibc would raise it, and keep what is freed
        M_MMAP_THRESHOLD = -3
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    small = prepare_model(Path(folder, "small"), **options).load()
    before = peak()
    unloaded = prepare_model(Path(folder, "large"), quantization=quantization or None, **options)
    footprint = unloaded.footprint()
    unloaded.load()
    print(footprint.peak, peak() - before, flush=True)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        measure(*json.loads(line))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("it could not be measured")
"""
SMALL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def measuring() -> Iterator["subprocess.Popen[str]"]:
    command, pipe = [sys.executable, "-c", MEASURE], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process's memory from /proc")


@on_linux
@pytest.mark.parametrize(
    ("name", "overrides", "mode"),
    [
        ("many layers", {"num_hidden_layers": 8}, "auto"),
        ("tied, large vocabulary", {"vocab_size": 40_000, "tie_word_embeddings": True}, "auto"),
        ("tied, oneDNN", {"vocab_size": 40_000, "tie_word_embeddings": True}, "off"),
        ("many positions", {"max_position_embeddings": 500_000}, "auto"),
    ],
)
def test_the_peak_of_loading_is_what_was_said(
    tmp_path: Path, measuring: "subprocess.Popen[str]", name: str, overrides: dict[str, Any], mode: str
) -> None:
    said, measured = peaks(tmp_path, measuring, overrides, mode)
    assert measured == pytest.approx(said, rel=0.06, abs=16 * MIB), name


@on_linux
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_hidden_layers": 12},
        {"vocab_size": 40_000, "tie_word_embeddings": True},
        {"vocab_size": 40_000, "tie_word_embeddings": False},
    ],
)
def test_quantising_takes_no_more_than_was_said(
    tmp_path: Path, measuring: "subprocess.Popen[str]", overrides: dict[str, Any], quantization: str
) -> None:
    """The head is quantised first, when nothing else is loaded yet."""
    said, measured = peaks(tmp_path, measuring, overrides, "auto", quantization)
    assert said / 2 < measured <= said + 16 * MIB


def peaks(
    tmp_path: Path,
    measuring: "subprocess.Popen[str]",
    overrides: dict[str, Any],
    mode: str,
    quantization: str = "",
) -> tuple[int, int]:
    """Return the predicted and the measured peak memory of loading a model with random weights."""
    if mode == "auto":
        skip_without_compiler()
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_hidden_layers": 2}
    for folder, config in (("small", SMALL), ("large", {**SMALL, **sizes, **overrides})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert measuring.stdin is not None
    assert measuring.stdout is not None
    measuring.stdin.write(json.dumps([str(tmp_path), mode, quantization]) + "\n")
    measuring.stdin.flush()
    said, measured = map(int, measuring.stdout.readline().split())
    print(said, measured)
    return said, measured
