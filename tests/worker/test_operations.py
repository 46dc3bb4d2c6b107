"""The operations of a model on a GPU, and the log lines where plain torch computes them."""

import json
import sys

import pytest
import torch

from testing.checkpoints.families import make_checkpoint
from testing.kernels.device import choose_device

choose_device()

from pagewire.network.families import parse_config  # noqa: E402
from pagewire.network.operations import AttentionHeads  # noqa: E402
from worker_service.attention import AttentionShape, create_backend  # noqa: E402
from worker_service.device.kernels import create_device_operations  # noqa: E402
from worker_service.device.triton_operations import TritonOperations  # noqa: E402
from worker_service.models.torch_operations import Operations  # noqa: E402

CUDA = torch.device("cuda")


def listed(tmp_path, family, **overrides):
    config = json.loads((make_checkpoint(tmp_path, family, seed=1) / "config.json").read_text())
    return parse_config({**config, **overrides}).operations


def test_triton_kernels_compute_on_a_gpu(tmp_path, caplog):
    qwen3, gpt2 = listed(tmp_path / "qwen3", "qwen3", head_dim=32), listed(tmp_path / "gpt2", "gpt2", n_head=8)
    assert isinstance(create_device_operations(qwen3, CUDA), TritonOperations)
    # GPT-2 uses only the matrix multiplications, whatever its heads.
    assert isinstance(create_device_operations(gpt2, CUDA), TritonOperations)
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 8}, "rotate heads of size 16 to 512 in steps of 8, and the model's heads have size 8"),
        ({"hidden_size": 65537}, "normalize rows of at most 65536 elements, and the model's rows have 65537"),
    ],
)
def test_what_they_cannot_compute_is_plain_torch_and_told(tmp_path, caplog, changes, message):
    assert type(create_device_operations(listed(tmp_path, "qwen3", **changes), CUDA)) is Operations
    assert [record.getMessage() for record in caplog.records] == [
        f"the model is computed in plain torch, which is slower: the Triton kernels {message}"
    ]


def test_missing_triton_is_told(tmp_path, caplog, monkeypatch):
    for package, module in (
        ("worker_service.attention.backends", "triton"),
        ("worker_service.device", "triton_operations"),
    ):
        monkeypatch.setitem(sys.modules, f"{package}.{module}", None)
        monkeypatch.delattr(f"{package}.{module}", raising=False)
    assert type(create_device_operations(listed(tmp_path, "qwen3"), CUDA)) is Operations
    shape = AttentionShape((AttentionHeads(4, 2, 32, 1.0),) * 2, 16, torch.float32, torch.float32)
    assert create_backend("auto", CUDA, shape).name == "torch"
    messages = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "triton cannot be imported" in messages[0]
    assert "attention backend 'triton' needs triton to be installed" in messages[1]
    with pytest.raises(ValueError, match="needs triton to be installed"):
        create_backend("triton", CUDA, shape)
