import subprocess
import sys
from typing import Any

import pytest
import torch

from pagewire.common.process.memory_size import parse_memory
from worker_service.config import WorkerConfig
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import choose_dtype


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"model": ""}, "--model"),
        ({"port": 65536}, "--port"),
        ({"device": "tpu"}, "--device"),
        ({"dtype": "int8"}, "--dtype"),
        ({"load_format": "pt"}, "--load-format"),
        ({"attention_backend": "magic"}, "--attention-backend"),
        ({"block_size": 0}, "--block-size"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"num_device_blocks": 0}, "--num-device-blocks"),
        ({"num_host_blocks": -1}, "--num-host-blocks"),
        ({"swap_space": "none"}, "--swap-space"),
        ({"swap_space": "1GiB", "num_host_blocks": 5}, "--swap-space is 1GiB and --num-host-blocks is 5"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"num_threads": 0}, "--num-threads"),
        ({"profile": -1}, "--profile"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"tensor_parallel_rank": 1}, "--tensor-parallel-rank is 1; it must be 0 to 0"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_rank": 1},
            "--tensor-parallel-rank is 1, but --tensor-parallel-address is missing",
        ),
        ({"tensor_parallel_size": 2, "tensor_parallel_address": "50071"}, "--tensor-parallel-address is '50071'"),
        ({"tensor_parallel_size": 2, "tensor_parallel_address": "host:0"}, "--tensor-parallel-address is 'host:0'"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_address": "file:here"},
            "it must be HOST:PORT or file:/D",
        ),
        ({"socket": ""}, "--socket is '', 0 bytes long; the path of a Unix socket must have 1 to 107"),
        ({"socket": "/tmp/a,b"}, "it must have no comma"),
        ({"socket": "/tmp/" + "é" * 52}, "109 bytes long"),
        ({"socket": "/tmp/s", "tensor_parallel_size": 2}, "--socket is for one rank"),
        ({"kv_cache_memory": "much"}, "--kv-cache-memory"),
        ({"max_graph_batch_size": -1}, "--max-graph-batch-size"),
        ({"max_graph_tokens": -1}, "--max-graph-tokens"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"tls_cert": "cert.pem"}, "--tls-key"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca"),
    ],
)
def test_bad_value_names_its_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        WorkerConfig(**{"model": "m", **fields}).validate()


@pytest.mark.parametrize(
    ("fields", "block_size"),
    [
        ({}, 16),
        ({"attention_backend": "flash_attn"}, 256),
        ({"attention_backend": "flash_attn", "block_size": 128}, 128),
        ({"block_size": 32}, 32),
    ],
)
def test_a_backend_has_blocks_that_suit_it_unless_others_are_asked_for(fields: dict[str, Any], block_size: int) -> None:
    assert WorkerConfig(model="m", **fields).choose_block_size() == block_size


def test_defaults_are_valid_and_the_budget_may_be_below_the_rows() -> None:
    WorkerConfig(model="m").validate()
    WorkerConfig(model="m", max_num_seqs=64, max_num_batched_tokens=8).validate()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 << 30), ("1.5 gib", 3 << 29), ("512MiB", 512 << 20), ("12KiB", 12 << 10), ("10000", 10_000)],
)
def test_memory_is_read_in_binary_units(text: str, num_bytes: int) -> None:
    assert parse_memory("--flag", text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "GiB", "4GB", "4 GiB more", "nan", "inf", "1e999", "0.1"])
def test_bad_memory_names_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--flag"):
        parse_memory("--flag", text)


def test_process_listens_before_it_imports_torch() -> None:
    code = "import sys, worker_service.config, worker_service.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["half", "float16"])
def test_a_cpu_computes_no_float16(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A CPU computes in float32, which represents every float16.

    Only our matrix multiplications keep the weights in 16 bits.
    """
    kernels = load_cpu_kernels()  # logs the kernels, unless this process has loaded them already
    caplog.clear()
    with caplog.at_level("INFO"):
        assert choose_dtype(name, "float32", torch.device("cpu"), kernels) is torch.float32
        assert choose_dtype(name, "bfloat16", torch.device("cpu"), None) is torch.float32
    widened = "in float32 too, since only the C kernels convert 16-bit weights"
    found = ["held in 16 bits" if kernels else widened, widened]
    assert [record.message for record in caplog.records] == [
        f"--dtype is {name}: a CPU computes in float32, over weights {held}" for held in found
    ]
    assert choose_dtype(name, "float32", torch.device("cuda")) is torch.float16


@pytest.mark.parametrize("flag", ["--swap-space", "--kv-cache-memory"])
@pytest.mark.parametrize("text", ["4", "0.5", " 512 "])
def test_a_size_without_its_unit_is_asked_for(flag: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{flag} is '{text}', .*; did you mean {text.strip()}GiB\?$"):
        parse_memory(flag, text, least=0)
