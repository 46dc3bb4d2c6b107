"""Reading published safetensors files, and the errors for broken files."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.network.checkpoint_files import CheckpointError, model_digest
from testing.checkpoints.families import make_checkpoint
from testing.models import load_model
from worker_service.models.checkpoint import Checkpoint, Piece

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return make_checkpoint(tmp_path, "qwen2", seed=1)


@pytest.fixture
def sharded(tmp_path):
    path = make_checkpoint(tmp_path, "qwen2", seed=1, max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def load(path):
    return load_model(path, dtype=torch.float32, device=CPU)


def edit_tensors(path, **changes):
    """Replace tensors in a single-file checkpoint; None removes a tensor."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def test_sharded_equals_single(tmp_path, sharded):
    single = make_checkpoint(tmp_path / "single", "qwen2", seed=1)
    expected = load_file(single / "model.safetensors")
    checkpoint = Checkpoint(sharded)
    assert checkpoint.names == expected.keys()
    for name, tensor in expected.items():
        target = torch.empty_like(tensor)
        checkpoint.copy(name, Piece(target))
        assert torch.equal(target, tensor)


def test_copy_converts_to_the_target(path):
    name = "model.layers.1.mlp.down_proj.weight"
    target = torch.empty(96, 64, dtype=torch.bfloat16)
    Checkpoint(path).copy(name, Piece(target.t()))
    assert torch.equal(target.t(), load_file(path / "model.safetensors")[name].bfloat16())


def test_progress_counts_every_tensor_once(sharded):
    calls = []
    load_model(sharded, dtype=torch.float32, device=CPU, progress=lambda *call: calls.append(call))
    total = len(Checkpoint(sharded).names)
    assert calls == [(num_loaded, total) for num_loaded in range(1, total + 1)]


def test_dummy_weights_are_those_that_models_begin_with(path):
    parameters = dict(load_model(path, dtype=torch.float32, device=CPU, is_dummy=True).named_parameters())
    for name, parameter in parameters.items():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith(".weight") else 0.0)).all(), name
        else:
            assert parameter.mean().abs() < 0.001, name
            assert 0.019 < parameter.std() < 0.021, name
    assert {parameter.dim() for parameter in parameters.values()} == {1, 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.layers.1.self_attn.k_proj.bias",
            r"tensor model\.layers\.1\.self_attn\.k_proj\.bias is missing.*\[32\]",
        ),
        ("lm_head.weight", r"tensor lm_head\.weight is missing"),
    ],
)
def test_missing_tensor(path, name, message):
    edit_tensors(path, **{name: None})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_wrong_shape(path):
    edit_tensors(path, **{"model.layers.0.self_attn.v_proj.weight": torch.zeros(16, 64)})
    message = r"v_proj\.weight in model\.safetensors has shape \[16, 64\], expected \[32, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load(path)


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{EXPERTS}.3.up_proj.weight": None}, r"tensor .*experts\.3\.up_proj\.weight is missing .* \[32, 64\]"),
        ({f"{EXPERTS}.8.up_proj.weight": torch.zeros(32, 64)}, r"tensor .*\.8\.up_proj\.weight in .* has no place in"),
        ({"model.layers.0.mlp.gate.weight": torch.zeros(9, 64)}, r"gate\.weight .* \[9, 64\], expected \[8, 64\]"),
        ({f"{EXPERTS}.down_proj": torch.zeros(8, 64, 32)}, r"tensor .*experts\.down_proj in .* has no place in"),
    ],
)
def test_tensors_of_experts(tmp_path, changes, message):
    path = make_checkpoint(tmp_path, "qwen3_moe", seed=1)
    edit_tensors(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 64, 64), r"experts\.gate_up_proj\[7\]\.chunk\(2\)\[0\] is missing in .*; expected shape \[32, 64\]"),
        ((9, 64, 64), r"tensor model\.layers\.0\.mlp\.experts\.8\.gate_proj\.weight and 1 more in .* has no place in"),
        ((8, 65, 64), r"experts\.gate_up_proj\[0\]\.chunk\(2\)\[1\] in .* has shape \[33, 64\], expected \[32, 64\]"),
    ],
)
def test_a_tensor_of_all_experts(tmp_path, shape, message):
    path = make_checkpoint(tmp_path, "qwen3_moe", seed=1)
    each = {f"{EXPERTS}.{expert}.{name}_proj.weight": None for expert in range(8) for name in ("gate", "up")}
    edit_tensors(path, **each, **{f"{EXPERTS}.gate_up_proj": torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize(("num_layers", "more"), [(1, ""), (2, " and 1 more")])
def test_tensors_without_a_place(path, num_layers, more):
    extra = {f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(64) for layer in range(num_layers)}
    edit_tensors(path, **extra)
    message = rf"tensor model\.layers\.0\.self_attn\.o_proj\.bias{more} in the checkpoint has no place in Decoder"
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_integer_weights(path):
    edit_tensors(path, **{"lm_head.weight": torch.zeros(151, 64, dtype=torch.int8)})
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight in model\.safetensors is I8, which is not a float type"
    ):
        load(path)


def test_missing_shard(sharded):
    next(sharded.glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors is missing; the index of the"):
        load(sharded)


FORMER = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}


@pytest.mark.parametrize("index", [json.dumps(FORMER), '{"weight_map": {"x": "model.safetensors"}}', "{}", "[", "\0"])
def test_an_index_of_former_files_beside_a_whole_model(path, index):
    """Tools leave such an index when they write a merged or quantised model into a copy of its directory."""
    expected = load(path).state_dict()
    (path / "model.safetensors.index.json").write_text(index)
    found = load(path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_model_file_that_an_index_names_with_others_is_a_part(path):
    whole = load_file(path / "model.safetensors")
    apart = {name: tensor for name, tensor in whole.items() if ".1." in name}
    save_file(apart, path / "further.safetensors")
    edit_tensors(path, **dict.fromkeys(apart))
    names = {name: "further.safetensors" if name in apart else "model.safetensors" for name in whole}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    load(path)


def test_index_that_names_a_file_elsewhere(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../other.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r'names "\.\./other\.safetensors", which is not a file in the same directory'
    ):
        load(sharded)


def test_truncated_file(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load(path)


def test_pickled_weights_are_not_read(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match=r"holds neither model\.safetensors nor .* such as pytorch_model\.bin, are never loaded: convert",
    ):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json is missing: --model must name a checkpoint directory"),
        ("{", r"config\.json is not JSON: Expecting property name"),
        ("[" * 100_000, r"config\.json is not readable JSON: it is nested too deeply"),
        ("[]", r"config\.json holds list, but must hold an object"),
        (r'{"model_type": "\ud800"}', r"config\.json: '\\ud800' is an unpaired surrogate, which text may not contain"),
    ],
)
def test_broken_config(path, text, message):
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_model_digest(path):
    config = (path / "config.json").read_bytes()
    assert model_digest(path) == hashlib.sha256(config).digest()
    (path / "tokenizer.json").write_bytes(b"{}")
    assert model_digest(path) == hashlib.sha256(config + b"{}").digest()
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        model_digest(path)
