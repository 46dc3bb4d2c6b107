"""Experts that a checkpoint stores as stacked tensors, as in published gpt-oss files: in MXFP4, or as floats."""

import pytest
import torch
from safetensors.torch import load_file

from pagewire.network.checkpoint_files import CheckpointError
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.packed import make_mxfp4
from testing.models import load_model
from testing.worker.model_logits import compute_logits, edited, host_operations, random_tokens, use_kernels
from tests.worker.thread_ranks import Meeting, ThreadRank
from worker_service.models.linear import ExpertLinear
from worker_service.models.loading import prepare_model
from worker_service.startup.cpu_kernels import load_cpu_kernels

CPU = torch.device("cpu")
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
FILE = r"model\.safetensors"


def load(path, dtype=torch.float32, **options):
    return load_model(path, dtype=dtype, device=CPU, operations=host_operations(), **options)


def packed_experts(model):
    """Return each layer's packed expert weights: first the gate and up projections, then the down projections."""
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    return [packed for each in experts for packed in each.product.packed.linears]


def rows_of(packed):
    return load_cpu_kernels().lookup_rows(packed, torch.arange(packed.out_size))


def test_a_model_computes_as_if_its_experts_were_floats(tmp_path, monkeypatch):
    use_kernels(monkeypatch, "off")
    token_ids = random_tokens()
    logits = [compute_logits(load(path), token_ids) for path in make_mxfp4(tmp_path, seed=1)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_kernels_hold_what_the_codes_mean(tmp_path, monkeypatch, num_ranks):
    """The values agree bit for bit for each rank's columns, in 4 bits and a byte for each group."""
    use_kernels(monkeypatch, "require")
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96} if num_ranks == 3 else {}
    paths = make_mxfp4(tmp_path, seed=2, **sizes)
    for rank in range(num_ranks):
        options = {"communicator": ThreadRank(Meeting(num_ranks), rank)} if num_ranks > 1 else {}
        experts = [packed_experts(load(path, **options)) for path in paths]
        assert len(experts[0]) == 2 * 2 * 4
        for ours, meant in zip(*experts, strict=True):
            assert torch.equal(rows_of(ours), rows_of(meant))
            assert (ours.format.bits, ours.format.scale_dtype) == (4, torch.float8_e8m0fnu)
            assert (ours.bias is None) == (meant.bias is None)
            assert ours.bias is None or torch.equal(ours.bias, meant.bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_compute_near_what_the_codes_mean(tmp_path, monkeypatch, dtype):
    """Inputs are rounded to 8 bits for codes only, so the logits are close but not equal."""
    use_kernels(monkeypatch, "require")
    computed = getattr(torch, dtype)
    paths = make_mxfp4(tmp_path, seed=3, dtype=dtype)
    actual, expected = (compute_logits(load(path, computed), random_tokens(), dtype=computed) for path in paths)
    assert torch.nn.functional.cosine_similarity(actual.float(), expected.float()).mean() > 0.995


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_are_quantised_while_loading(tmp_path, monkeypatch, quantization):
    use_kernels(monkeypatch, "require")
    path = make_checkpoint(tmp_path, "gpt_oss", seed=4, dtype="bfloat16")
    model = load(path, quantization=quantization)
    stored = load_file(path / "model.safetensors")[GATE_UP].float()
    bits = {"int8": 8, "int4": 6}[quantization]  # 6 because the rows are no blocks
    for expert, packed in enumerate(packed_experts(model)[:4]):
        # Gates come first; the checkpoint has [in, out] with alternating gates and ups.
        rows = torch.cat([stored[expert].t()[0::2], stored[expert].t()[1::2]]).contiguous()
        assert torch.equal(rows_of(packed), load_cpu_kernels().quantize(rows, bits).dequantized())
    if quantization == "int8":
        expected = compute_logits(load(path), random_tokens())
        logits = compute_logits(model, random_tokens())
        assert torch.nn.functional.cosine_similarity(logits, expected).mean() > 0.995


def test_what_a_model_takes_is_known_before_it_is_loaded(tmp_path, monkeypatch):
    use_kernels(monkeypatch, "require")
    quantized, _ = make_mxfp4(tmp_path, seed=5, hidden_size=128, intermediate_size=512, num_local_experts=8)
    unloaded = prepare_model(quantized, dtype=torch.float32, device=CPU, operations=host_operations())
    assert unloaded.describe_quantization().startswith("weights are stored in mxfp4 in 4 bits: 32 of ")
    plain = prepare_model(tmp_path / "plain", dtype=torch.float32, device=CPU, operations=host_operations())
    saved = plain.footprint().held - unloaded.footprint().held
    held = sum(packed.panels.nbytes for packed in packed_experts(unloaded.load()))
    num_weights = 2 * 8 * 3 * 128 * 512
    assert (held, saved) == (num_weights * 4.25 / 8, num_weights * 4 - held)


BROKEN = {
    "no scales": (f"{GATE_UP}_scales", None, rf"tensor {GATE_UP}_scales\[0, 0::2\] is missing in .*; mxfp4 in 4 bits"),
    "no blocks": (f"{DOWN}_blocks", None, rf"tensor {DOWN}_blocks\[0, :\] is missing in "),
    "other groups": (
        f"{GATE_UP}_scales", torch.zeros(4, 192, 4, dtype=torch.uint8),
        rf"tensor {GATE_UP}_scales\[0, 0::2\] in {FILE} has shape \[96, 4\], expected \[96, 2\] for mxfp4 in 4 bits",
    ),
    "another type": (
        f"{DOWN}_scales", torch.zeros(4, 64, 3, dtype=torch.int8), rf"{DOWN}_scales\[0, :\] in {FILE} is I8, expec"
    ),
    "too few dimensions": (
        f"{DOWN}_scales", torch.zeros(4, 64, dtype=torch.uint8),
        rf"tensor {DOWN}_scales in {FILE} has shape \[4, 64\], expected 3 dimensions; the first is the number",
    ),
    "an expert too many": (
        f"{DOWN}_bias", torch.zeros(5, 64), r"tensor model.layers.1.mlp.experts.4.down_proj.bias in the .* no place in"
    ),
    "an expert too few": (f"{DOWN}_bias", torch.zeros(3, 64), rf"{DOWN}_bias\[3, :\] is missing in .* shape \[64\]"),
    "biases of another size": (f"{DOWN}_bias", torch.zeros(4, 65), rf"{DOWN}_bias\[0, :\] .* \[65\], expected \[64\]"),
    "one expert by itself": (
        "model.layers.1.mlp.experts.2.down_proj.bias", torch.zeros(64), rf"tensor {DOWN}_bias in the .* has no place in"
    ),
    "no bias": (f"{GATE_UP}_bias", None, rf"tensor {GATE_UP}_bias\[0, 0::2\] is missing in .*; expected shape \[96\]"),
    "no sinks": ("model.layers.1.self_attn.sinks", None, r"tensor model.layers.1.self_attn.sinks is missing in"),
    "no router": ("model.layers.0.mlp.router.bias", None, r"tensor model.layers.0.mlp.router.bias is missing in"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "message"), BROKEN.values(), ids=BROKEN)
def test_a_tensor_that_does_not_fit_is_refused_before_any_is_read(tmp_path, name, tensor, message):
    path, _ = make_mxfp4(tmp_path, seed=6)
    edited(path, **{name: tensor})
    with pytest.raises(CheckpointError, match=message):
        prepare_model(path, dtype=torch.float32, device=CPU)


def test_an_exponent_that_stands_for_no_number_is_refused(tmp_path):
    path, _ = make_mxfp4(tmp_path, seed=7)
    scales = load_file(path / "model.safetensors")[f"{DOWN}_scales"]
    scales[2, 5, 1] = 255
    edited(path, **{f"{DOWN}_scales": scales})
    message = rf"tensor {DOWN}_scales\[2, :\] in {FILE} has scales that are not finite"
    with pytest.raises(CheckpointError, match=message):
        load_model(path, dtype=torch.float32, device=CPU)


def test_a_share_that_cuts_a_group_is_refused(tmp_path):
    path, _ = make_mxfp4(tmp_path, seed=8)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size cuts the groups of 32 inputs of .*down_proj.* lower"):
        prepare_model(path, dtype=torch.float32, device=CPU, communicator=ThreadRank(Meeting(2), 1))


@pytest.mark.parametrize("size", [1, 2])
def test_gates_and_ups_are_told_apart(tmp_path, monkeypatch, size):
    """A shard of a stack with alternating projections contains a shard of each projection."""
    use_kernels(monkeypatch, "require")
    path = make_checkpoint(tmp_path, "gpt_oss", seed=9)
    stored = load_file(path / "model.safetensors")
    for rank in range(size):
        options = {"communicator": ThreadRank(Meeting(size), rank)} if size > 1 else {}
        model, share = load(path, **options), 96 // size
        columns = slice(rank * share, (rank + 1) * share)
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts"
            ours = packed_experts(model)[8 * layer :]
            for expert in range(4):
                gate_up, down = (stored[f"{experts}.{name}"][expert].t() for name in ("gate_up_proj", "down_proj"))
                parts = [gate_up[part::2][columns] for part in (0, 1)]
                assert torch.equal(rows_of(ours[expert]), torch.cat(parts))
                assert torch.equal(rows_of(ours[4 + expert]), down[:, columns])
