"""Checkpoints whose LM head is quantised: its weights equal the format's definition bit for bit, and so do logits."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.network.checkpoint_files import CheckpointError
from testing.checkpoints.packed import make_quantized, with_section
from testing.checkpoints.quantized import BY_NAME
from testing.models import load_model
from testing.worker.model_logits import (
    TOLERANCE,
    compute_logits,
    host_operations,
    random_tokens,
    transformers_logits,
    use_kernels,
)
from tests.thorough import thorough
from tests.worker.thread_ranks import kept

CPU = torch.device("cpu")
# The vocabulary is a multiple of the 8 codes in a word.
SIZES = {"vocab_size": 160}


def with_head(name: str):
    """Return a case whose settings say that the head is quantised."""
    case = BY_NAME[name]
    match case.section["quant_method"]:
        case "gptq":
            return with_section(case, lm_head=True)
        case "compressed-tensors":
            return with_section(case, ignore=[])
        case "bitsandbytes":  # a list without the head, in place of the default, which is the head alone
            return with_section(case, llm_int8_skip_modules=["visual"])
    return case


HEADS = ("GPTQ", "W4A16 asymmetric", "FP8 block", "FP8 tensor")
BYTES = ("W8A8", "LLM.int8")  # their codes are named `weight`
MORE_HEADS = ("GPTQ of 8 bits", "GPTQ in act-order", "W8A16", *BYTES, "FP8 by channel", "W4A16 in act-order")


def make(directory, name, family="llama", **more):
    return make_quantized(directory, family, with_head(name), seed=31, skips=(), **SIZES, **more)


def load_float32(path, operations=None):
    return load_model(path, dtype=torch.float32, device=CPU, operations=operations)


@pytest.mark.parametrize("name", [HEADS[0], HEADS[2], *thorough(*HEADS[1::2], *MORE_HEADS)])
def test_logits_are_those_of_the_dequantised_head(tmp_path, name):
    quantized, plain = make(tmp_path, name)
    assert "lm_head.weight" not in load_file(quantized / "model.safetensors") or "FP8" in name or name in BYTES
    logits = [compute_logits(load_float32(path), random_tokens()) for path in (quantized, plain)]
    assert torch.equal(*logits)
    expected = transformers_logits(plain, random_tokens())
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*HEADS, *MORE_HEADS])
def test_the_kernels_multiply_with_the_codes_of_the_head(tmp_path, monkeypatch, name):
    use_kernels(monkeypatch, "require")
    operations = host_operations()
    models = [load_float32(path, operations) for path in make(tmp_path, name)]
    heads = [model.head.product.packed for model in models]
    rows = torch.arange(160)
    assert torch.equal(*(operations.kernels.lookup_rows(packed, rows) for packed in heads))
    assert bool(heads[0].format.group_size) == ("act-order" not in name)
    assert not heads[1].format.group_size
    # Inputs are rounded to 8 bits for codes, and to bfloat16 for FP8.
    logits = [compute_logits(model, random_tokens()) for model in models]
    assert torch.nn.functional.cosine_similarity(*logits).min() > 0.995


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_ranks_have_parts_of_the_head(tmp_path, name):
    sizes = {"num_attention_heads": 8, "hidden_size": 128, "intermediate_size": 192}
    quantized, plain = (kept(path, 2) for path in make(tmp_path, name, **sizes))
    for rank, expected in zip(quantized, plain, strict=True):
        assert torch.equal(rank["head"].weight, expected["head"].weight)


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_name(tmp_path, name):
    case = with_head(name)
    paths = make_quantized(tmp_path, "gpt_neox", case, seed=32, **SIZES)
    for path in paths:
        tensors = load_file(path / "model.safetensors")
        assert "embed_out.weight" in tensors
    generator = torch.Generator().manual_seed(33)
    stored, meant = case.draw(generator, *tensors["embed_out.weight"].shape)
    changes = {f"embed_out.{kind}": tensor for kind, tensor in stored.items()}, {"embed_out.weight": meant}
    for path, change in zip(paths, changes, strict=True):
        tensors = load_file(path / "model.safetensors")
        del tensors["embed_out.weight"]
        save_file({**tensors, **change}, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(*(compute_logits(load_float32(path), random_tokens()) for path in paths))


@pytest.mark.parametrize("name", [HEADS[0], *thorough(*HEADS[1:])])
def test_a_tied_head_stays_in_floats(tmp_path, name):
    paths = make(tmp_path, name, tie_word_embeddings=True)
    models = [load_float32(path) for path in paths]
    assert models[0].embedding is models[0].head
    assert torch.equal(*(compute_logits(model, random_tokens()) for model in models))


@pytest.mark.parametrize("name", [HEADS[0], *thorough(*HEADS[1:])])
def test_names_of_tied_multimodal_checkpoints_are_found(tmp_path, name):
    """No quantised matrix has a tensor named `weight`, and there is no head, but norms show which names are used."""
    quantized, plain = make(tmp_path, name, family="mistral", tie_word_embeddings=True)
    tensors = load_file(quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    expected = compute_logits(load_float32(plain), random_tokens())
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": True, "text_config": config}
    (quantized / "config.json").write_text(json.dumps({**outer, "quantization_config": config["quantization_config"]}))
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {re.sub(r"^model\.", prefix, own): tensor for own, tensor in tensors.items()}
        save_file(renamed, quantized / "model.safetensors", {"format": "pt"})
        assert torch.equal(compute_logits(load_float32(quantized), random_tokens()), expected)


@pytest.mark.parametrize("name", [HEADS[0], *thorough(*HEADS[1:])])
def test_a_quantised_embedding_is_refused(tmp_path, name):
    quantized, _ = make(tmp_path, name)
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    stored, _ = with_head(name).draw(torch.Generator().manual_seed(34), 160, 64)
    tensors |= {f"model.embed_tokens.{kind}": tensor for kind, tensor in stored.items()}
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    message = r"model\.embed_tokens\.\w+ in model\.safetensors belongs to a quantised embedding; only embeddings in fl"
    with pytest.raises(CheckpointError, match=message):
        load_float32(quantized)
