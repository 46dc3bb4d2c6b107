"""Invalid quantised checkpoints: each is refused in one line that names the tensor and the file."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from pagewire.network.checkpoint_files import CheckpointError
from testing.checkpoints.packed import E4M3, make_quantized, with_section
from testing.checkpoints.quantized import BY_NAME
from testing.models import load_model
from testing.worker.model_logits import compute_logits, edited, random_tokens
from tests.broken_json import refusal_of, spoil_safetensors
from worker_service.models.loading import prepare_model

pytestmark = pytest.mark.one_of_each

CPU = torch.device("cpu")
QUERIES, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
FILE = r"model\.safetensors"


def prepare(path):
    return prepare_model(path, dtype=torch.float32, device=CPU)


def load(path):
    return load_model(path, dtype=torch.float32, device=CPU)


HEADERS = {
    "no scale": (
        "W4A16", "weight_scale", None, r"is missing in .*; pack-quantized in 4 bits requires it in shape \[64, 4"
    ),
    "no scale of floats": ("FP8 by channel", "weight_scale", None, r"is missing in .* shape \[64, 1\] or \[64\]"),
    "no scale of blocks": (
        "FP8 block", "weight_scale_inv", None, r"is missing in .*; fp8 in 8 bits requires it in shape"
    ),
    "no words": ("GPTQ", "qweight", None, r"is missing in .*; gptq in 4 bits requires it in shape \[8, 64\]"),
    "no zero points": ("W4A16 asymmetric", "weight_zero_point", None, r"is missing"),
    "no order": ("GPTQ in act-order", "g_idx", None, r"is missing in .* requires it in shape \[64\]"),
    "zero points too many": (
        "W4A16", "weight_zero_point", torch.zeros(8, 4, dtype=torch.int32), r" in the checkpoint has no place in Dec"
    ),
    "another shape": (
        "AWQ", "qweight", torch.zeros(64, 4, dtype=torch.int32),
        rf"in {FILE} has shape \[64, 4\], expected \[64, 8\] for awq in 4 bits",
    ),
    "scales of other groups": (
        "GPTQ", "scales", torch.ones(2, 64), rf"in {FILE} has shape \[2, 64\], expected \[4, 64\] for gptq in 4 bits"
    ),
    "words of 64 bits": (
        "AWQ", "qweight", torch.zeros(64, 8, dtype=torch.int64), rf"in {FILE} is I64, expected I32 for awq in 4 bits"
    ),
    "whole scales": (
        "FP8 block", "weight_scale_inv", torch.ones(4, 2, dtype=torch.int32), rf"in {FILE} is I32, expected F32 or BF16"
    ),
    "zero points in words of their own": (
        "W4A16 asymmetric", "weight_zero_point", torch.zeros(64, 4, dtype=torch.int32),
        rf"in {FILE} has shape \[64, 4\], expected \[8, 4\] for pack-quantized in 4 bits",
    ),
    "too few zero points": (
        "W4A16 asymmetric", "weight_zero_point", torch.zeros(8, 4, dtype=torch.int8),
        rf"in {FILE} has shape \[8, 4\], expected \[64, 4\] for pack-quantized in 4 bits",
    ),
    "another storage": ("nf4", "weight", torch.ones(1024, 1).bfloat16(), rf"in {FILE} is BF16, expected U8 for nf4"),
    "another float": ("FP8 block", "weight", torch.ones(64, 64).to(torch.float8_e5m2), rf"in {FILE} is F8_E5M2, expe"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "kind", "tensor", "message"), HEADERS.values(), ids=HEADERS)
def test_a_tensor_that_does_not_fit_is_refused_before_any_is_read(tmp_path, case, kind, tensor, message):
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[case], seed=21)
    edited(path, **{f"{QUERIES}.{kind}": tensor})
    with pytest.raises(CheckpointError, match=f"tensor {QUERIES}.{kind}.*{message}"):
        prepare(path)


def scale_with(value, shape, dtype=torch.float32):
    scale = torch.ones(shape, dtype=dtype)
    scale.view(-1)[-1] = value
    return scale


def state_of(**changes):
    state = {"shape": [64, 64], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.1, **changes}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
ORDER = torch.arange(64, dtype=torch.int32) // 16
NAN = torch.nan
CONTENTS = {
    "NaN in W4A16": (
        "W4A16", "weight_scale", scale_with(NAN, (64, 4), torch.bfloat16), "has scales that are not finite"
    ),
    "infinity in GPTQ": (
        "GPTQ", "scales", scale_with(torch.inf, (4, 64), torch.half), "has scales that are not finite"
    ),
    "NaN in AWQ": ("AWQ", "scales", scale_with(NAN, (4, 64)), "has scales that are not finite"),
    "NaN in FP8": ("FP8 block", "weight_scale_inv", scale_with(NAN, (4, 2)), "has scales that are not finite"),
    "no power of two": (
        "FP8 block", "weight_scale_inv", scale_with(NAN, (4, 2)).to(torch.float8_e8m0fnu),
        "has scales that are not finite",
    ),
    "negative FP8": ("FP8 tensor", "weight_scale", torch.tensor(-1.0), "contains a negative scale"),
    "NaN among values": ("FP8 by channel", "weight", scale_with(NAN, (64, 64)).to(E4M3), "has NaN values"),
    "a group too far": ("GPTQ", "g_idx", ORDER + 1, "refers to group 4 of a weight that has 4"),
    "a group before the first": ("GPTQ in act-order", "g_idx", ORDER - 1, "refers to group -1 of a weight that has 4"),
    "other zero points": ("GPTQ", "qzeros", torch.zeros(4, 8, dtype=torch.int32), "contains zero points other than 8,"),
    "no global scale": (
        "NVFP4", "weight_global_scale", torch.zeros(1), "has scales that are not finite"
    ),
    "infinity in NVFP4": ("NVFP4 of ModelOpt", "weight_scale_2", torch.tensor(torch.inf), "has scales that are not f"),
    "NaN in nf4": ("nf4", "weight.absmax", scale_with(NAN, (64,)), "has scales that are not finite"),
    "no JSON": ("nf4", STATE, torch.zeros(9, dtype=torch.uint8), "is not an object in JSON with the settings of the"),
    "no number": ("nf4", STATE, state_of(nested_offset="1"), "is not an object in JSON with the settings of the weig"),
    "another shape in nf4": ("nf4", STATE, state_of(shape=[64, 63]), r"says shape \[64, 63\], expected \[64, 64\]"),
    "other blocks": ("nf4", STATE, state_of(blocksize=128), "says blocks of 128, which do not fit the 64 scales"),
    "no blocks": ("nf4", STATE, state_of(blocksize=None), "says blocks of null, which do not fit the 64 scales"),
    "other nested blocks": (
        "nf4 with nested scales", STATE, state_of(nested_blocksize=32), "says blocks of 32, which do not fit the 1"
    ),
    "no nested scales": (
        "nf4", "weight.absmax", torch.zeros(64, dtype=torch.uint8), "is quantised, but a tensor of its scales or of"
    ),
    "an order of rows": ("LLM.int8", "weight_format", torch.tensor([1], dtype=torch.uint8), "is 1, but must be 0"),
    "another size": ("W8A16", "weight_shape", torch.tensor([64, 63]), r"says \[64, 63\], expected \[64, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "kind", "tensor", "message"), CONTENTS.values(), ids=CONTENTS)
def test_a_tensor_that_holds_what_it_cannot_is_refused_as_it_is_loaded(tmp_path, case, kind, tensor, message):
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[case], seed=22)
    edited(path, **{f"{QUERIES}.{kind}": tensor})
    unloaded = prepare(path)
    with pytest.raises(CheckpointError, match=f"tensor {QUERIES}.{kind} in {FILE} {message}"):
        unloaded.load()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("AWQ", {"group_size": 48}, "q_proj.weight: its 64 inputs are not a multiple of the group size 48"),
        ("GPTQ", {"group_size": 128}, "q_proj.weight: its 64 inputs are not a multiple of the group size 128"),
    ],
)
def test_a_group_size_that_does_not_divide_is_refused(tmp_path, case, changes, message):
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[case], seed=23)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config does not fit \S+\.{message}"):
        prepare(path)


class Rank:
    rank, size = 1, 2


@pytest.mark.parametrize("case", ["W4A16", "GPTQ", "AWQ", "FP8 block"])
def test_ranks_that_would_cut_groups_are_refused(tmp_path, case):
    """96 columns of the MLP in groups of 16 or 32 can be divided between two ranks; 2 * 40 columns cannot."""
    case = replace(BY_NAME[case])
    path, _ = make_quantized(tmp_path, "llama", case, seed=24, intermediate_size=80)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size cuts the groups of \d+ inputs of .*down_proj.weight"):
        prepare_model(path, dtype=torch.float32, device=CPU, communicator=Rank())


def test_a_module_to_skip_is_stored_as_floats(tmp_path):
    """The tensors of a skipped module are refused if they are quantised.

    A module that is not skipped but stored as floats is loaded as floats.
    """
    case = with_section(BY_NAME["AWQ"], modules_to_not_convert=["q_proj"])
    path, _ = make_quantized(tmp_path / "one", "llama", case, seed=25)
    with pytest.raises(CheckpointError, match=r"tensor \S+q_proj\.qweight and 5 more in the checkpoint has no place"):
        prepare(path)
    path, plain = make_quantized(tmp_path / "other", "llama", BY_NAME["AWQ"], seed=25, skips=("lm_head", QUERIES))
    token_ids = random_tokens()
    assert torch.equal(*(compute_logits(load(path), token_ids) for path in (path, plain)))


def test_integers_without_a_config_are_refused(tmp_path):
    path, _ = make_quantized(tmp_path, "llama", BY_NAME["W8A8"], seed=26)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    edited(path, **{name: None for name in load_file(path / "model.safetensors") if name.endswith("_scale")})
    with pytest.raises(CheckpointError, match=rf"in {FILE} is I8, which is not a float type; config\.json has no quan"):
        prepare(path)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_a_model_has_not_may_be_zero_in_gptq(tmp_path, value):
    path, _ = make_quantized(tmp_path, "llama", BY_NAME["GPTQ"], seed=27)
    edited(path, **{f"{DOWN}.bias": torch.full((64,), value)})
    if value:
        with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.bias in the checkpoint has no place in Decoder"):
            prepare(path)
    else:
        load(path)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", ["W4A16 asymmetric", "FP8 block", "GPTQ in act-order", "AWQ", "nf4"])
def test_a_file_that_is_not_whole_is_one_line(tmp_path, case, seed):
    rng = random.Random(f"{case} {seed}")
    path, _ = make_quantized(tmp_path, "llama", BY_NAME[case], seed=28, num_hidden_layers=1)
    spoil_safetensors(path, rng, is_cut=seed % 2 == 1)
    text = refusal_of(lambda: load(path), CheckpointError)
    assert text is not None or seed % 2 == 0, "a file that is cut off was taken for whole"
    assert text is None or "model.safetensors" in text or "tensor" in text
