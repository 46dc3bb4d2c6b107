"""Quantised checkpoints: weights equal their formats' definition bit for bit, alone and in whole models."""

import itertools
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.common.process.memory_size import describe_memory
from pagewire.network.checkpoint_files import CheckpointError, model_digest
from pagewire.network.quantization import parse_quantization
from pagewire.network.source import load_config
from pagewire.network.weight_formats import WeightFormat
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.checkpoints.families import FAMILIES, make_checkpoint
from testing.checkpoints.packed import awq, gptq, make_quantized, modelopt
from testing.checkpoints.quantized import BY_NAME, CASES
from testing.models import load_model
from testing.worker.model_logits import compute_logits, host_operations, packed_products, random_tokens, use_kernels
from tests.worker.thread_ranks import Meeting, ThreadRank, kept
from worker_service.config import WorkerConfig
from worker_service.models.checkpoint import Checkpoint, Piece
from worker_service.models.layouts import layout_of
from worker_service.models.layouts.layout import copy_floats
from worker_service.models.linear import Linear
from worker_service.models.quantized_checkpoint import QuantizedCheckpoint, formats_of
from worker_service.startup.loader import load_worker

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def open_weight(path, case, seed, out_size, in_size):
    """Return a checkpoint with one weight, `model.x`, and the weight's dequantised values."""
    tensors, meant = case.draw(torch.Generator().manual_seed(seed), out_size, in_size)
    save_file({f"model.x.{kind}": tensor for kind, tensor in tensors.items()}, path / "model.safetensors")
    weight_format = formats_of(parse_quantization({"quantization_config": case.section}), ["model.x"])["model.x"]
    return QuantizedCheckpoint(Checkpoint(path), {"model.x": weight_format}), meant


def read(checkpoint, shape, index=(), whole=()):
    piece = Piece(torch.full(shape, torch.nan), shape=whole, index=index)
    checkpoint.check("model.x.weight", piece)
    checkpoint.copy("model.x.weight", piece)
    return piece.target


@pytest.mark.parametrize("seed", range(3))
@EVERY_CASE
def test_a_weight_is_what_its_format_means(tmp_path, case, seed):
    # compressed-tensors cannot unpack zero points of 8 outputs.
    least = 16 if case.section["quant_method"] == "compressed-tensors" else 8
    out_size, in_size = [(64, 96), (least, 32), (104, 160)][seed]
    checkpoint, meant = open_weight(tmp_path, case, seed, out_size, in_size)
    assert torch.equal(read(checkpoint, (out_size, in_size)), meant)
    assert checkpoint.names == checkpoint.stored_names("model.x.weight") & Checkpoint(tmp_path).names


@EVERY_CASE
def test_a_part_of_a_weight_is_a_part_of_what_it_means(tmp_path, case):
    checkpoint, meant = open_weight(tmp_path, case, 7, 96, 160)
    rows, columns = slice(40, 72), slice(0, 96)
    if case.name == "FP8 block, odd":
        columns = slice(80, 120)
    assert torch.equal(read(checkpoint, (32, 160), (rows,), (96, 160)), meant[rows])
    part = read(checkpoint, (32, columns.stop - columns.start), (rows, columns), (96, 160))
    assert torch.equal(part, meant[rows, columns])


@pytest.mark.parametrize("case", [gptq("8", 4, 8, version="gptq", sym=False, g_idx="none"), awq("24", 24)])
def test_groups_of_odd_sizes_mean_what_others_do(tmp_path, case):
    checkpoint, meant = open_weight(tmp_path, case, 8, 32, 72)
    assert torch.equal(read(checkpoint, (32, 72)), meant)


@pytest.mark.parametrize("name", ["W4A16 by channel", "W8A16 by channel, asymmetric", "W8A8", "GPTQ by channel"])
def test_a_row_that_is_one_group_can_be_cut_anywhere(tmp_path, name):
    checkpoint, meant = open_weight(tmp_path, BY_NAME[name], 9, 32, 72)
    part = read(checkpoint, (8, 27), (slice(4, 12), slice(10, 37)), (32, 72))
    assert torch.equal(part, meant[4:12, 10:37])


@EVERY_CASE
def test_a_model_computes_as_if_its_weights_were_floats(tmp_path, monkeypatch, case):
    use_kernels(monkeypatch, "off")
    family = ("llama", "qwen3_moe", "llama", "qwen3")[CASES.index(case) % 4]
    paths = make_quantized(tmp_path, family, case, seed=11, tie_word_embeddings=case.name == "W8A8")
    token_ids = random_tokens()
    logits = [
        compute_logits(load_model(path, dtype=torch.float32, device=CPU, operations=host_operations()), token_ids)
        for path in paths
    ]
    assert torch.equal(*logits)


@EVERY_CASE
def test_the_kernels_multiply_with_what_the_weights_mean(tmp_path, monkeypatch, case):
    """The packed weights agree bit for bit, as codes or as floats.

    Inputs are rounded to 8 bits for codes, and to bfloat16 for FP8.
    """
    use_kernels(monkeypatch, "require")
    family = ("llama", "qwen3_moe", "llama", "qwen3")[CASES.index(case) % 4]
    overrides = {"num_hidden_layers": 2, "num_experts_per_tok": 8} if family == "qwen3_moe" else {}  # all experts
    paths = make_quantized(tmp_path, family, case, seed=11, tie_word_embeddings=case.name == "W8A8", **overrides)
    operations = host_operations()
    models = [load_model(path, dtype=torch.float32, device=CPU, operations=operations) for path in paths]
    quantized, plain = map(packed_products, models)
    assert quantized.keys() == plain.keys()
    for name in quantized:
        rows = torch.arange(quantized[name].out_size)
        took = [operations.kernels.lookup_rows(packed[name], rows) for packed in (quantized, plain)]
        assert torch.equal(*took)
    stays = [packed for packed in quantized.values() if packed.format.group_size]
    widened = ("FP8 block, odd", "nf4", "nf4 with nested scales", "fp4 in blocks of 128")
    keeps_codes = "in act-order" not in case.name and case.name not in widened
    assert bool(stays) == keeps_codes
    for packed in stays:
        assert (packed.format.element == torch.float8_e4m3fn) == case.name.startswith("FP8")
        assert packed.format.bits == (8 if "8" in case.name else 4)
    actual, expected = (compute_logits(model, random_tokens()) for model in models)
    assert torch.nn.functional.cosine_similarity(actual, expected).min() > 0.995


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("W4A16 asymmetric", "GPTQ")], ids=lambda case: case.name)
def test_every_family_can_be_quantised(tmp_path, monkeypatch, family, case):
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    paths = make_quantized(tmp_path, family, case, seed=12)
    token_ids = random_tokens()
    logits = [compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids) for path in paths]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["NVFP4 of ModelOpt", "MXFP4 of Quark", "nf4 with nested scales", "LLM.int8"])
@pytest.mark.parametrize("family", ["phi3", "falcon", "mixtral", "qwen3_5_text", "qwen3_next"])
def test_projections_that_are_stored_together_can_be_quantised(tmp_path, monkeypatch, family, name):
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    paths = make_quantized(tmp_path, family, BY_NAME[name], seed=12)
    logits = [compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens()) for path in paths]
    assert torch.equal(*logits)


@EVERY_CASE
def test_ranks_have_the_parts_of_what_the_weights_mean(tmp_path, case):
    """The sizes are such that no shard splits a group."""
    sizes = {"num_attention_heads": 8, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 64}
    if case.name == "FP8 block, odd":
        sizes |= {"head_dim": 40, "intermediate_size": 160}
    quantized, plain = (kept(path, 2) for path in make_quantized(tmp_path, "llama", case, seed=13, **sizes))
    for rank, expected in zip(quantized, plain, strict=True):
        assert rank.keys() == expected.keys()
        assert all(torch.equal(rank[name].weight, expected[name].weight) for name in rank)


@pytest.mark.parametrize("case", [case for case in CASES if "FP8" not in case.name], ids=lambda case: case.name)
def test_ranks_keep_their_parts_of_the_codes(tmp_path, monkeypatch, case):
    """Each rank keeps codes wherever a single rank does, with the same dequantised values bit for bit."""
    use_kernels(monkeypatch, "require")
    sizes = {"num_attention_heads": 8, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 64}
    paths = make_quantized(tmp_path, "llama", case, seed=13, **sizes)
    options = {"dtype": torch.float32, "device": CPU, "operations": host_operations()}
    whole = [module.product for module in load_model(paths[0], **options).modules() if isinstance(module, Linear)]
    for rank in range(2):
        models = [load_model(path, communicator=ThreadRank(Meeting(2), rank), **options) for path in paths]
        products = [[module.product for module in model.modules() if isinstance(module, Linear)] for model in models]
        for ours, meant, one in zip(*products, whole, strict=True):
            assert ours.packed.format.element == one.packed.format.element
            rows = torch.arange(ours.packed.out_size)
            assert torch.equal(ours.lookup_rows(rows), meant.lookup_rows(rows))


def test_weights_are_loaded_in_the_dtype_that_is_computed_in(tmp_path):
    quantized, plain = make_quantized(tmp_path, "qwen3", BY_NAME["AWQ"], seed=14)
    models = [load_model(path, dtype=torch.bfloat16, device=CPU) for path in (quantized, plain)]
    token_ids = random_tokens()
    logits = [compute_logits(model, token_ids, dtype=torch.bfloat16) for model in models]
    assert torch.equal(*logits)


def test_progress_counts_weights_not_their_tensors(tmp_path):
    quantized, plain = make_quantized(tmp_path, "llama", BY_NAME["GPTQ"], seed=15)
    calls = []
    load_model(quantized, dtype=torch.float32, device=CPU, progress=lambda *call: calls.append(call))
    total = len(Checkpoint(plain).names)
    assert calls == [(num_loaded, total) for num_loaded in range(1, total + 1)]


def test_scales_of_activations_and_caches_are_left_alone(tmp_path):
    quantized, plain = make_quantized(tmp_path, "llama", BY_NAME["FP8 tensor"], seed=16)
    tensors = load_file(quantized / "model.safetensors")
    layer = "model.layers.0.self_attn"
    tensors |= {f"{layer}.{name}": torch.ones(1) for name in ("q_proj.input_scale", "k_scale", "v_scale", "kv_scale")}
    save_file(tensors, quantized / "model.safetensors")
    token_ids = random_tokens()
    logits = [
        compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids) for path in (quantized, plain)
    ]
    assert torch.equal(*logits)


def test_scales_of_caches_beside_weights_that_are_not_quantised(tmp_path):
    """llm-compressor writes such files for a model of which only the cache is quantised."""
    path = make_checkpoint(tmp_path, "llama", seed=16)
    expected = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "kv_scale")}
    save_file(tensors, path / "model.safetensors")
    section = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": ["lm_head"]}
    config = json.loads((path / "config.json").read_text())
    for group in ({}, {"group_0": {"targets": ["Linear"], "weights": None}}):
        changed = {**config, "quantization_config": {**section, "config_groups": group}}
        (path / "config.json").write_text(json.dumps(changed))
        assert load_config(path).quantization is None
        assert torch.equal(compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens()), expected)


@pytest.mark.parametrize(
    ("name", "file", "renamed"),
    [
        ("GPTQ", "quantize_config.json", {}),
        ("GPTQ asymmetric", "quantize_config.json", {}),
        ("AWQ", "quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
        ("AWQ", "quant_config.json", {}),
    ],
)
def test_a_file_of_its_own_says_how_weights_are_quantised(tmp_path, name, file, renamed):
    """A separate file may contain the quantisation settings, as AutoGPTQ and AutoAWQ first wrote it."""
    quantized, plain = make_quantized(tmp_path, "llama", BY_NAME[name], seed=18)
    config = json.loads((quantized / "config.json").read_text())
    section = {renamed.get(key, key): value for key, value in config.pop("quantization_config").items()}
    del section["quant_method"]
    (quantized / "config.json").write_text(json.dumps(config))
    (quantized / file).write_text(json.dumps(section))
    models = [load_model(path, dtype=torch.float32, device=CPU) for path in (quantized, plain)]
    assert torch.equal(*(compute_logits(model, random_tokens()) for model in models))
    (quantized / file).write_text(json.dumps({**section, renamed.get("bits", "bits"): 3}))
    with pytest.raises(CheckpointError, match=rf"{file}: bits is 3, but must be 4"):
        load_config(quantized)


def test_a_file_of_modelopt_says_how_weights_are_quantised(tmp_path):
    quantized, plain = make_quantized(tmp_path, "llama", BY_NAME["NVFP4 of ModelOpt"], seed=18)
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head*"]}
    (quantized / "config.json").write_text(json.dumps(config))
    file = quantized / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    models = [load_model(path, dtype=torch.float32, device=CPU) for path in (quantized, plain)]
    assert torch.equal(*(compute_logits(model, random_tokens()) for model in models))
    file.write_text(json.dumps({"quantization": {**settings, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match=r'hf_quant_config.json: quant_algo is "W4A8_AWQ", but must be'):
        load_config(quantized)


def test_a_model_in_blocks_of_modelopt(tmp_path):
    case = modelopt("FP8 in blocks", "FP8_PB_WO")
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    paths = make_quantized(tmp_path, "llama", case, seed=18, **sizes)
    models = [load_model(path, dtype=torch.float32, device=CPU) for path in paths]
    assert torch.equal(*(compute_logits(model, random_tokens()) for model in models))


def test_modules_of_one_checkpoint_have_formats_of_their_own(tmp_path):
    """ModelOpt lists the modules of each format by name, and a mixture of experts has thousands of them."""
    nvfp4, fp8 = BY_NAME["NVFP4 of ModelOpt"], BY_NAME["FP8 of ModelOpt"]
    quantized, plain = make_quantized(tmp_path, "qwen3_moe", nvfp4, seed=18)
    stored, meant = (load_file(path / "model.safetensors") for path in (quantized, plain))
    generator, layers = torch.Generator().manual_seed(18), {}
    for name in [name for name in stored if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        if "self_attn" in module:
            layers[module] = {"quant_algo": "FP8"}
            del stored[name]
            tensors, meant[f"{module}.weight"] = fp8.draw(generator, *meant[f"{module}.weight"].shape)
            stored |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    save_file(stored, quantized / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    models = [load_model(path, dtype=torch.float32, device=CPU) for path in (quantized, plain)]
    assert torch.equal(*(compute_logits(model, random_tokens()) for model in models))


def test_both_services_tell_formats_apart_by_their_digest(tmp_path):
    """Different formats of the same model have different digests, which both services compute alike."""
    digests = {}
    for index, name in enumerate(("GPTQ asymmetric", "GPTQ v2", "GPTQ of 8 bits", "AWQ", "W4A16", "FP8 block")):
        quantized, plain = make_quantized(tmp_path / str(index), "llama", BY_NAME[name], seed=17)
        digests[name], digests["plain"] = model_digest(quantized), model_digest(plain)
        assert read_model_info(str(quantized)).digest == digests[name]
    assert len(set(digests.values())) == 7


@pytest.mark.parametrize("name", ["GPTQ of 8 bits", "nf4"])
def test_a_worker_says_what_becomes_of_quantised_weights(tmp_path, caplog, name):
    quantized, _ = make_quantized(tmp_path, "qwen3", BY_NAME[name], seed=18)
    config = WorkerConfig(model=str(quantized), device="cpu", dtype="float32", num_device_blocks=200)
    with caplog.at_level(logging.INFO):
        load_worker(config, "worker")
    kept = "nf4 in 4 bits: 0" if name == "nf4" else "gptq in 8 bits: 8"
    assert f"weights are stored in {kept} of 9 linear layers use them directly" in caplog.text
    size = describe_memory((quantized / "model.safetensors").stat().st_size)
    assert "other quantised weights are widened to float32; the model takes " in caplog.text
    assert f", its files {size}" in caplog.text


def test_a_layout_without_a_file_is_refused(tmp_path):
    checkpoint, _ = make_quantized(tmp_path, "llama", BY_NAME["AWQ"], seed=20)
    name = "model.layers.0.mlp.up_proj"
    with pytest.raises(CheckpointError, match=rf'^config\.json: .*: {name}\.weight is "q9", but must be in one of .*'):
        QuantizedCheckpoint(Checkpoint(checkpoint), {name: WeightFormat("q9", 4, 1, 128)})


@EVERY_CASE
def test_decoding_a_weight_takes_no_more_memory_than_was_said(monkeypatch, case):
    """The limit covers torch's allocations beside the target, and the tensors that are read."""
    monkeypatch.setattr("worker_service.models.layouts.layout._CHUNK_ELEMENTS", 1 << 14)
    tensors, _ = case.draw(torch.Generator().manual_seed(19), 256, 4000)
    weight_format = formats_of(parse_quantization({"quantization_config": case.section}), ["model.x"])["model.x"]
    layout, target = layout_of("model.x", weight_format), torch.empty(256, 4000)
    with torch.profiler.profile(profile_memory=True) as profile:
        copy_floats(target, layout.decode(weight_format, tensors, 256, 4000))
    used = sum(tensor.nbytes for tensor in tensors.values()) + peak_of(profile)
    said = layout.working_bytes(weight_format, target.numel())
    assert said / 3 < used <= said


def peak_of(profile):
    """Return the largest number of bytes allocated at a time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
