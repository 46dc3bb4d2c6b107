"""Every family compared with transformers on random checkpoints, in uneven chunks over the paged cache."""

import json
import random
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config, text_settings
from pagewire.network.operations import Part, Projection, Share
from pagewire.network.source import load_config
from testing import models
from testing.checkpoints.families import (
    DECODER,
    DEFAULTS,
    EXPERTS,
    FAMILIES,
    FIRST_FAMILIES,
    NO_SPECIAL_TOKENS,
    NUM_EXPERTS,
    PLAIN_HEADS,
    draw_weights,
    make_checkpoint,
)
from testing.worker.model_logits import (
    BIASES,
    CPU,
    TOLERANCE,
    compute_logits,
    create_attention,
    edit_config,
    host_operations,
    random_tokens,
    transformers_logits,
    use_kernels,
)
from tests.thorough import thorough
from worker_service.attention import AttentionBatch
from worker_service.host.cpu_decoder import CpuDecoder, host_model
from worker_service.host.cpu_operations import create_host_operations
from worker_service.models.linear import Linear
from worker_service.startup.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.one_of_each

SEVEN = {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}
EQUAL = {"num_key_value_heads": 4}
WIDE = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}
ODD = {"head_dim": 40}  # not hidden_size / num_attention_heads
TIED = {"tie_word_embeddings": True}
WINDOWED = {"use_sliding_window": True, "sliding_window": 12}


def rope(rope_type, theta=10_000.0, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **parameters}}


LINEAR = rope("linear", factor=4.0)
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48, theta=500.0
)
# As in Llama 4 Scout, no frequencies are blended.
STEP = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=48)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=256)
YARN_SHARE = rope("yarn", factor=4.0, original_max_position_embeddings=256, partial_rotary_factor=0.5)
YARN_BETAS = rope(
    "yarn", factor=8.0, original_max_position_embeddings=128, beta_fast=6.0, beta_slow=0.5, truncate=False,
    attention_factor=1.3,
)  # fmt: skip
YARN_SCALES = rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.2)


def longrope(original, share=1.0):
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(4)], "long_factor": [2.0 + 0.3 * i for i in range(4)]}
    settings = rope("longrope", original_max_position_embeddings=original, partial_rotary_factor=share, **factors)
    return {**settings, "original_max_position_embeddings": original, "max_position_embeddings": 128}


def phimoe_longrope(original):
    """Return settings with equal factors for all lengths: transformers computes with the short factors only."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": original}
    factors = [1.0 + 0.2 * i for i in range(8)]
    settings = rope("longrope", short_factor=factors, long_factor=factors, **scales)
    return {**settings, "max_position_embeddings": 128}


PHI3_SMALL_LONGROPE = {
    "rope_scaling": {
        "type": "su",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "short_mscale": 1.1,
        "long_mscale": 1.3,
    }
}
SPREAD = {"head_dim": 24, "num_key_value_heads": 1}  # heads whose rotated part is three quarters of a power of two
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
SCALED_KINDS = {
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
}
YARN_KINDS = {
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 500_000.0},
        FULL: {
            "rope_type": "yarn",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.2,
        },
    }
}

VARIANTS = [
    *((family, {}) for family in FAMILIES[len(FIRST_FAMILIES) :]),
    ("smollm3", {**TIED, **BIASES, "no_rope_layers": [0, 1, 1, 0]}),
    ("smollm3", {**WINDOWED, "no_rope_layer_interval": 2}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    ("phi3", {**longrope(128, 0.5), "head_dim": 16}),  # short factors
    ("phi3", {**longrope(32, 0.5), "num_key_value_heads": 1, "sliding_window": None}),  # long factors
    ("granite", {**BIASES, **TIED}),
    ("ministral3", {"num_key_value_heads": 1, "sliding_window": 12}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 1, **YARN}),
    ("olmo3", {**KINDS, **YARN_KINDS}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("glm", {"attention_bias": False, **SPREAD, "partial_rotary_factor": 0.75}),
    ("glm4", {"partial_rotary_factor": 1.0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}),
    ("gemma2", {"final_logit_softcapping": 2.0, **SPREAD}),
    ("gemma3_text", {**KINDS, **SCALED_KINDS}),
    ("gemma3_text", {**KINDS, "final_logit_softcapping": 5.0, **SPREAD}),
    ("starcoder2", {"use_bias": False, "hidden_act": "gelu", "sliding_window": None}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "relu"}),
    ("gpt_neox", {"attention_bias": False, "rotary_pct": 0.5, "hidden_act": "gelu_fast", **TIED}),
    ("qwen3_moe", {**WINDOWED, "decoder_sparse_step": 2, "mlp_only_layers": None, "attention_bias": True}),
    ("qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False, **SPREAD}),
    ("mixtral", {"sliding_window": 20, "num_experts_per_tok": 1, **TIED}),
    ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "clip_qkv": 0.8}),
    ("qwen2_moe", {**WINDOWED, "max_window_layers": 1, "qkv_bias": False, "norm_topk_prob": True}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1, **SPREAD}),
    ("glm4_moe", {"first_k_dense_replace": 0, "norm_topk_prob": False, **TIED}),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("exaone4", {"sliding_window": None, "layer_types": [FULL] * 4}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {"layer_types": [FULL, SLIDING, SLIDING, FULL], "num_key_value_heads": 1}),
    ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5, **TIED}),
    ("stablelm", {"qk_layernorm": True, "num_hidden_layers": 1}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    ("arcee", {**BIASES, "mlp_bias": True, **TIED}),
    ("granitemoehybrid", {"position_embedding_type": "nope", "shared_intermediate_size": 80, **TIED}),
    ("opt", {"activation_function": "gelu", "tie_word_embeddings": False}),
    ("minimax_m2", {"rotary_dim": 16, "num_key_value_heads": 1, **TIED}),
    ("dots1", {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 0, **BIASES}),
    ("olmo", {"clip_qkv": None, "attention_bias": True, **TIED}),
    ("phi3small", {**PHI3_SMALL_LONGROPE, "num_key_value_heads": 1, "blocksparse_homo_head_pattern": True}),
    (
        "phi3small",
        {"mup_use_scaling": False, "mup_embedding_multiplier": None, "gegelu_limit": None, "num_hidden_layers": 3},
    ),
    ("phi3small", {"dense_attention_every_n_layers": None, "ff_intermediate_size": None, "ff_dim_multiplier": 1}),
    ("phi3small", {"tie_word_embeddings": False, "dummy_token_indices": None, "num_key_value_heads": 4}),
    ("falcon", {"multi_query": False, "bias": True, "parallel_attn": False, "tie_word_embeddings": False}),
    ("falcon", {"ffn_hidden_size": 80, "num_attention_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 1}),
    ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("phimoe", {**phimoe_longrope(128), "attention_bias": True, "lm_head_bias": True, "sliding_window": 12}),
    ("phimoe", {**phimoe_longrope(32), "num_key_value_heads": 1, "router_jitter_noise": 0.05, **TIED}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 0, **EQUAL, **YARN}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "tie_word_embeddings": False}),
    ("apertus", {**LLAMA3, "attention_bias": True, **TIED, "num_key_value_heads": 1}),
    ("afmoe", {"mup_enabled": False, "global_attn_every_n_layers": 2, "num_dense_layers": 0, **SPREAD}),
    ("afmoe", {"num_shared_experts": 1, "layer_types": [FULL, SLIDING] * 2, "attention_bias": True, **LINEAR}),
    ("hunyuan_v1_dense", {**YARN_BETAS, **SPREAD, **BIASES, **TIED}),
    ("llama4_text", {"moe_layers": [], "use_qk_norm": False, "attn_temperature_tuning": False, **BIASES, **TIED}),
    ("llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 2, "no_rope_layers": [0, 1, 1, 0], **STEP}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, **EQUAL, **LINEAR}),
    ("lfm2", {"conv_L_cache": 2, "head_dim": 24, "num_key_value_heads": 1, "block_ffn_dim_multiplier": 0.4, **YARN}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [3], "num_hidden_layers": 5, "norm_eps": 0.01}),
    ("qwen3_5_text", {"layer_types": None, "num_hidden_layers": 4}),
    ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 2, **TIED, **SPREAD}),
    ("qwen3_5_text", {"attention_bias": True, "linear_num_key_heads": 12, "linear_conv_kernel_dim": 2}),
    ("qwen3_5_text", {"linear_key_head_dim": 20, "linear_value_head_dim": 12, "linear_num_key_heads": 3, **WIDE}),
    ("qwen3_5_text", {"layer_types": [FULL, FULL, "linear_attention"], "num_key_value_heads": 1, **YARN_SHARE}),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 7, "partial_rotary_factor": 1.0, **EQUAL}),
    ("lfm2_moe", {"use_expert_bias": False, "num_dense_layers": 0, "tie_word_embeddings": False, **EQUAL}),
    ("lfm2_moe", {"norm_topk_prob": False, "num_dense_layers": 2, "num_experts_per_tok": 8, "conv_bias": True}),
    ("qwen3_5_moe_text", {"layer_types": None, "full_attention_interval": 2, "attention_bias": True, **TIED}),
    ("qwen3_5_moe_text", {"linear_num_value_heads": 4, "num_experts_per_tok": 1, **SPREAD}),
    ("qwen3_next", {"mlp_only_layers": None, "decoder_sparse_step": 2, "attention_bias": True, **TIED}),
    ("qwen3_next", {"linear_num_key_heads": 3, "linear_key_head_dim": 12, "norm_topk_prob": False, **YARN_SHARE}),
    ("bloom", {"n_head": 7, "hidden_size": 56, "tie_word_embeddings": False}),
    ("mpt", {"n_heads": 5, "d_model": 80, "attn_config": {}, "tie_word_embeddings": False}),
    ("mpt", {"n_heads": 1, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}}),
    *[("llama", kw) for kw in ({}, TIED, BIASES, SEVEN, EQUAL, WIDE, ODD, LINEAR, LLAMA3, YARN, YARN_SCALES)],
    *[("mistral", {"sliding_window": window}) for window in (None, 1, 7, 8, 33, 63, 64, 4096)],
    ("mistral", {"sliding_window": 10, **SEVEN, **TIED}),
    *[("qwen2", kw) for kw in ({}, TIED, SEVEN, EQUAL, WIDE, YARN)],
    *[("qwen2", {**WINDOWED, "max_window_layers": num}) for num in (0, 1, 2)],
    ("qwen2", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen2", {**WINDOWED, "sliding_window": None}),
    ("qwen3", {**WINDOWED, "max_window_layers": 1}),
    *[("qwen3", kw) for kw in ({}, TIED, {"attention_bias": True}, SEVEN, EQUAL, WIDE, ODD, YARN_BETAS)],
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt2", {"n_embd": 160, "n_head": 2, "n_inner": 96, "activation_function": "gelu"}),
]


@pytest.fixture(params=["fused", "kernels", "torch"])
def path_of_model(request, monkeypatch):
    """Run every test with all layers in one call of the CPU kernels, with a call per operation, and in plain torch."""
    use_kernels(monkeypatch, "off" if request.param == "torch" else "require")
    return request.param


@pytest.fixture
def load_model(path_of_model):
    def load(path, *, dtype, **options):
        model = models.load_model(path, dtype=dtype, operations=host_operations(), **options)
        model.is_fused = path_of_model == "fused"
        return model

    return load


def name_of(value):
    return value if isinstance(value, str) else "-".join(f"{key}={x}" for key, x in value.items())[:60] or "plain"


# All families without overrides, and every other of the rest; `make test-all` has all.
NUM_PLAIN = len(FAMILIES) - len(FIRST_FAMILIES)
SPARED = VARIANTS[NUM_PLAIN::2]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*VARIANTS[:NUM_PLAIN], *VARIANTS[NUM_PLAIN + 1 :: 2], *thorough(*SPARED)],
    ids=name_of,
)
def test_equals_transformers(load_model, tmp_path, family, overrides):
    path = make_checkpoint(tmp_path, family, seed=11, **overrides)
    token_ids = random_tokens()
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids)
    expected = transformers_logits(path, token_ids)
    assert actual.dtype == torch.float32
    limit = TOLERANCE * expected.abs().max().item()
    if family == "qwen3_5_text":
        # The delta rule rounds at each token, in transformers too: by as much as the tolerance allows both together.
        exact = transformers_logits(path, token_ids, torch.float64)
        limit += (expected - exact).abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit)


def make_multimodal_checkpoint(directory, family, text_family):
    """Return a vision-language checkpoint whose text model is drawn like the other checkpoints."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = json.loads((make_checkpoint(directory / "text", text_family, seed=11) / "config.json").read_text())
    vision |= {"image_size": 32, "patch_size": 8} | ({"head_dim": 8} if family == "mistral3" else {})
    options = {"mm_tokens_per_image": 4, "tie_word_embeddings": text["tie_word_embeddings"]}
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=vision, **options)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory / "text", dtype=torch.float32)
    model.model.language_model.load_state_dict(plain.model.state_dict())
    model.lm_head.load_state_dict(plain.lm_head.state_dict())
    model.save_pretrained(directory / "whole")
    return directory / "whole"


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize(
    ("family", "text_family"), [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")]
)
def test_the_text_model_of_one_that_sees(load_model, tmp_path, family, text_family, is_published):
    """Tensors have the names of published files or of transformers 5."""
    path, token_ids = make_multimodal_checkpoint(tmp_path, family, text_family), random_tokens()
    expected = transformers_logits(tmp_path / "text", token_ids)
    tensors = load_file(path / "model.safetensors")
    bare = {re.sub(r"^(model\.)?language_model\.(model\.)?", "", name): tensor for name, tensor in tensors.items()}
    assert len(bare) == len(tensors)
    assert any("vision_tower" in name for name in bare)

    def named(name):
        if "vision_tower" in name or "multi_modal" in name:
            return name.removeprefix("model.") if is_published else f"model.{name.removeprefix('model.')}"
        if name.startswith("lm_head"):
            return f"language_model.{name}" if is_published else name
        return f"{'language_model.model' if is_published else 'model.language_model'}.{name}"

    save_file({named(name): tensor for name, tensor in bare.items()}, path / "model.safetensors")
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen3"
    with pytest.raises(CheckpointError, match=r'model_type is "qwen3", but must be one of '):
        parse_config(config)


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
VISION3 = {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
QWENS = [
    ("qwen2_vl", {**PLAIN_HEADS, **MROPE}, {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}),
    ("qwen2_5_vl", {**PLAIN_HEADS, **MROPE, **WINDOWED, "max_window_layers": 1}, VISION),
    ("qwen3_vl", {**DECODER, **MROPE}, VISION3),
    ("qwen3_vl_moe", {**DECODER, **MROPE, **EXPERTS, "moe_intermediate_size": 24, "mlp_only_layers": [1]}, VISION3),
    ("qwen3_5", {**DEFAULTS["qwen3_5_text"], **MROPE}, {**VISION, "num_position_embeddings": 16}),
    ("qwen3_5_moe", {**DEFAULTS["qwen3_5_moe_text"], **MROPE}, {**VISION, "num_position_embeddings": 16}),
]


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize(("family", "text", "vision"), QWENS, ids=[family for family, *_ in QWENS])
def test_the_text_model_of_qwen_vl(load_model, tmp_path, family, text, vision, is_published):
    """Published files of Qwen2-VL and Qwen2.5-VL have the settings and the names of the text model at the top level,
    and published files of Qwen3-VL-MoE have transposed experts."""
    parts = {"text_config": {**text, **NO_SPECIAL_TOKENS}, "vision_config": vision, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **deepcopy(parts))  # it changes the rope's settings in place
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, seed=11)
    model.save_pretrained(tmp_path)
    token_ids = random_tokens()
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    if is_published and family.startswith("qwen2"):
        outer = json.loads((tmp_path / "config.json").read_text())
        flat = {**outer.pop("text_config"), **outer, "rope_parameters": None, "rope_theta": 10_000.0}
        flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "layer_types": None}
        (tmp_path / "config.json").write_text(json.dumps(flat))
    elif is_published and family == "qwen3_vl_moe":
        tensors = load_file(tmp_path / "model.safetensors")
        turned = {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}
        save_file(turned, tmp_path / "model.safetensors")
    elif family.startswith("qwen2"):
        tensors = load_file(tmp_path / "model.safetensors")
        renamed = {re.sub(r"^model\.(?!visual)", "model.language_model.", name): x for name, x in tensors.items()}
        save_file(renamed, tmp_path / "model.safetensors")
    actual = compute_logits(load_model(tmp_path, dtype=torch.float32, device=CPU), token_ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_the_text_model_of_llama4(load_model, tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8, "vision_output_dim": 16, "projector_output_dim": 16}
    text = {**DEFAULTS["llama4_text"], **NO_SPECIAL_TOKENS}
    config = transformers.Llama4Config(text_config=text, vision_config={**vision, "projector_input_dim": 16})
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    draw_weights(model, seed=11)
    model.save_pretrained(tmp_path)
    token_ids = random_tokens()
    with torch.inference_mode():
        expected = model.language_model(token_ids[None]).logits[0]
    loaded = load_model(tmp_path, dtype=torch.float32, device=CPU)
    actual = compute_logits(loaded, token_ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    assert loaded.network.max_position_embeddings == text["attention_chunk_size"]
    settings, length_key = text_settings(read_config(tmp_path))
    assert settings[length_key] == text["attention_chunk_size"]
    config = read_config(tmp_path)
    config["text_config"]["max_position_embeddings"] = 100
    assert parse_config(config).max_position_embeddings == 100


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_in_float64_are_computed_in_float32(load_model, tmp_path, dtype):
    path, token_ids = make_checkpoint(tmp_path, "llama", seed=11), random_tokens()
    expected = transformers_logits(path, token_ids)
    tensors = load_file(path / "model.safetensors")
    save_file({name: x.to(getattr(torch, dtype)) for name, x in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**read_config(path), "dtype": dtype}))
    assert parse_config(read_config(path)).dtype == "float32"
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_without_architectures_is_known_by_its_model_type(tmp_path, family):
    path = make_checkpoint(tmp_path, family, seed=1)
    config = read_config(path)
    assert parse_config({**config, "architectures": None}) == parse_config(config)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_within_its_rounding_of_transformers(load_model, tmp_path, family):
    """The distance to transformers must not exceed the distance between two bfloat16 runs.

    Any rounding may change the choice of experts, so all experts are chosen.
    """
    chosen = {"num_experts_per_tok": NUM_EXPERTS[family]} if family in NUM_EXPERTS else {}
    if family == "llama4_text":
        chosen = {"num_local_experts": 1}
    if family == "phimoe":  # both experts get weight 1
        chosen = {"num_local_experts": 2, "router_jitter_noise": 1e-6}
    if family in ("glm4_moe", "dots1"):
        chosen["topk_group"] = 4
    path = make_checkpoint(tmp_path, family, seed=12, dtype="bfloat16", **chosen)
    token_ids = random_tokens()
    exact = transformers_logits(path, token_ids)
    actual = compute_logits(load_model(path, dtype=torch.bfloat16, device=CPU), token_ids, dtype=torch.bfloat16)
    theirs = transformers_logits(path, token_ids, torch.bfloat16)
    assert actual.dtype == torch.float32
    assert (actual - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_rows_of_a_batch_do_not_touch_each_other(load_model, tmp_path):
    """The logits of a sequence are the same alone and beside others in the flat batch."""
    model = load_model(make_checkpoint(tmp_path, "qwen3", seed=13), dtype=torch.float32, device=CPU)
    first, second = random_tokens(1)[:9], random_tokens(2)[:14]
    storage = torch.full((5, 2, 2, 8, 2, 16), float("nan"))
    kv_cache = [(storage[:, layer, 0], storage[:, layer, 1]) for layer in range(2)]
    slots = torch.cat([torch.arange(8, 17), torch.arange(24, 38)])
    batch = AttentionBatch([0, 9, 23], [9, 14], torch.tensor([[[1, 2], [3, 4]]]), slots[None])
    with torch.inference_mode():
        attend = create_attention(model.network).prepare(batch, kv_cache)
        positions = torch.cat([torch.arange(9), torch.arange(14)])
        together = model.compute_logits(model.forward(torch.cat([first, second]), positions, attend))
    torch.testing.assert_close(together[:9], compute_logits(model, first, (9,)), rtol=0, atol=5e-5)
    torch.testing.assert_close(together[9:], compute_logits(model, second, (14,)), rtol=0, atol=5e-5)


def test_old_gpt2_names(load_model, tmp_path):
    """openai-community/gpt2 as published: names have no prefix, and the tensors include each layer's causal mask."""
    path = make_checkpoint(tmp_path, "gpt2", seed=14)
    expected = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    tensors = load_file(path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(tensors, path / "model.safetensors")
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_names_without_their_prefix(load_model, tmp_path, family):
    """Tensors may have names without a prefix, as in the published bigscience/bloom-560m."""
    path = make_checkpoint(tmp_path, family, seed=14)
    expected = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    tensors = load_file(path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens()), expected)


def test_bloom_and_mpt_as_their_publishers_spell_them(tmp_path):
    config = read_config(make_checkpoint(tmp_path / "bloom", "bloom", seed=14))
    published = {{"hidden_size": "n_embed", "n_head": "num_attention_heads"}.get(k, k): v for k, v in config.items()}
    assert parse_config(published) == parse_config(config)
    config = read_config(make_checkpoint(tmp_path / "mpt", "mpt", seed=14))
    published = {**config, "architectures": ["MPTForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.MPT"}}
    assert parse_config(published) == replace(parse_config(config), architecture="MPTForCausalLM")


def test_mpt_with_biases_as_its_own_code_has_them(load_model, tmp_path):
    """transformers leaves the biases out whatever `no_bias` is; torch's modules add them if they are set."""
    path = make_checkpoint(tmp_path, "mpt", seed=15)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    biases = {}
    for name, module in model.transformer.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
            module.bias = torch.nn.Parameter(torch.randn(len(module.weight)), requires_grad=False)
            biases[f"transformer.{name}.bias"] = module.bias.data
    save_file({**load_file(path / "model.safetensors"), **biases}, path / "model.safetensors")
    edit_config(path, no_bias=False)
    with torch.inference_mode():
        expected = model(random_tokens()[None]).logits[0]
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.parametrize("num_heads", [1, 2, 5, 8, 12, 40, 112])
@pytest.mark.parametrize("bias_max", [8, 16])
def test_slopes_are_those_of_transformers(tmp_path, num_heads, bias_max):
    """Some published MPTs have other values of `alibi_bias_max` than 8, which transformers' own model does not read."""
    mpt = {"n_heads": num_heads, "d_model": 8 * num_heads, "attn_config": {"alibi_bias_max": bias_max}}
    bloom = {"n_head": num_heads, "hidden_size": 8 * num_heads}
    slopes = {}
    for family, overrides in (("mpt", mpt), ("bloom", bloom)):
        edit_config(make_checkpoint(tmp_path / family, family, seed=16), **overrides)
        slopes[family] = torch.tensor(load_config(tmp_path / family).heads.alibi_slopes)
    distance_of_1 = -build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0]
    torch.testing.assert_close(slopes["mpt"], distance_of_1, rtol=1e-6, atol=0)
    torch.testing.assert_close(slopes["bloom"], build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1])


@pytest.mark.parametrize("family", sorted(NUM_EXPERTS.keys() - {"gpt_oss", "llama4_text"}))
def test_experts_that_are_one_tensor(load_model, tmp_path, family):
    """transformers 5 can write such files; published files store each expert separately."""
    path = make_checkpoint(tmp_path / "each", family, seed=17)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith(".experts.gate_up_proj") for name in stored)
    paths = (path, tmp_path / "stacked")
    logits = [compute_logits(load_model(each, dtype=torch.float32, device=CPU), random_tokens()) for each in paths]
    assert torch.equal(*logits)


def test_head_in_the_checkpoint_counts_even_if_config_ties_it(load_model, tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=15)
    expected = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    edit_config(path, tie_word_embeddings=True)
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), random_tokens())
    assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, transformers_logits(path, random_tokens()), rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_an_embedding_that_is_stored_as_the_tied_head(load_model, tmp_path, family):
    path, token_ids = make_checkpoint(tmp_path, family, seed=11, tie_word_embeddings=True), random_tokens()
    expected = transformers_logits(path, token_ids)
    tensors = load_file(path / "model.safetensors")
    (name,) = (name for name in tensors if "embed_tokens" in name or "wte" in name)
    tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, path / "model.safetensors")
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        load_model(path, dtype=torch.float32, device=CPU)
    edit_config(path, tie_word_embeddings=True)
    actual = compute_logits(load_model(path, dtype=torch.float32, device=CPU), token_ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_a_missing_head_suggests_that_it_is_the_embedding(tmp_path):
    path = make_checkpoint(tmp_path, "llama", seed=15, tie_word_embeddings=True)
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing in .* set tie_word_embeddings to true"):
        models.load_model(path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("mode", ["require", "off"])
def test_weights_are_not_held_twice(tmp_path, monkeypatch, mode):
    use_kernels(monkeypatch, mode)
    path = make_checkpoint(tmp_path, "llama", seed=16, **TIED)
    model = models.load_model(path, dtype=torch.float32, device=CPU, operations=host_operations())
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 9
    assert all(linear.weight is None for linear in linears if linear is not model.embedding)
    assert (model.embedding.weight is None) == (mode == "require")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("held", ["bfloat16", "float16"])
def test_weights_stay_as_small_as_the_checkpoint_has_them(tmp_path, monkeypatch, held, tied):
    """The kernels multiply by 16-bit weights directly; the model computes as with widened weights."""
    use_kernels(monkeypatch, "require")
    path = make_checkpoint(tmp_path, "qwen3", seed=19, dtype=held, tie_word_embeddings=tied)
    operations = host_operations()
    model = models.load_model(path, dtype=torch.float32, device=CPU, operations=operations)
    dtypes = {module.product.packed.format.element for module in model.modules() if isinstance(module, Linear)}
    assert dtypes == {getattr(torch, held)}
    model.is_fused = True
    actual = compute_logits(model, random_tokens())
    expected = transformers_logits(path, random_tokens())
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_only_what_the_kernels_compute_whole_is_fused(tmp_path, monkeypatch):
    use_kernels(monkeypatch, "require")
    ours, onednn = host_operations(), create_host_operations(load_cpu_kernels(), uses_onednn=True)
    for family, dtype, operations, expected in [
        ("qwen3", torch.float32, ours, True), ("qwen3", torch.bfloat16, ours, True),
        ("gpt2", torch.bfloat16, ours, True),
        ("qwen3", torch.float32, onednn, False), ("qwen3", torch.bfloat16, onednn, False),
    ]:  # fmt: skip
        path = make_checkpoint(tmp_path / f"{family}-{dtype}-{expected}", family, seed=22)
        model = models.load_model(path, dtype=dtype, device=CPU, operations=operations)
        assert isinstance(host_model(model, create_attention(model.network)), CpuDecoder) == expected
        assert host_model(model, create_attention(model.network, "torch")) is model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 300])
@pytest.mark.parametrize("mode", ["require", "off"])
def test_linear_keeps_its_values_when_packed(monkeypatch, mode, num_rows, bias):
    use_kernels(monkeypatch, mode)
    torch.manual_seed(0)
    parts = tuple(Part(f"part.{size}", Share.of(size)) for size in (8, 3, 3))
    linear = Linear(Projection(parts, Share.of(24), has_bias=bias), host_operations())
    weights = [torch.randn(size, 24) for size in (8, 3, 3)]
    linear.weight.data[:] = torch.cat(weights)
    if bias:
        linear.bias.data.normal_()
    x = torch.randn(num_rows, 24)
    linear.finish_loading(torch.float32)
    torch.testing.assert_close(linear(x), F.linear(x, torch.cat(weights), linear.bias), rtol=0, atol=1e-5)


def read_config(path):
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("overrides", [{}, LINEAR, LLAMA3, YARN_BETAS, {"dtype": "bfloat16"}], ids=name_of)
def test_both_spellings_of_config_mean_the_same(tmp_path, overrides):
    config = read_config(make_checkpoint(tmp_path, "llama", seed=17, **overrides))
    parameters = dict(config["rope_parameters"])
    spelled_4 = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    spelled_4["torch_dtype"] = config["dtype"]
    spelled_4["rope_theta"] = parameters.pop("rope_theta")
    for key in ("rope_type", "type"):  # "type" is older still
        scaling = {key if name == "rope_type" else name: value for name, value in parameters.items()}
        spelled_4["rope_scaling"] = None if scaling == {key: "default"} else scaling
        assert parse_config(spelled_4) == load_config(tmp_path)


# Families whose classes in transformers differ in reading the two spellings, or in their defaults.
BOTH_SPELLINGS = ("llama", "qwen3", "glm4", "gpt_neox", "mixtral", "smollm3", "gpt_oss", "olmo3", "gemma3_text")
ADDED = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "default"},
)


def recipe(family, rng):
    """Return a config.json of transformers 5 with a user's rope_scaling, and transformers' rope parameters for it."""
    config_class = transformers.AutoConfig.for_model(family).__class__
    written = config_class(**{**DEFAULTS[family], **NO_SPECIAL_TOKENS})
    config = json.loads(written.to_json_string(use_diff=False))
    inner = config["rope_parameters"].get(FULL, config["rope_parameters"])
    inner["rope_theta"] = rng.choice([inner["rope_theta"], 5e5, 7e6])
    inner |= rng.choice([{}, {}, {"rope_type": "linear", "factor": 2.0}])
    if inner["rope_type"] == "linear":
        for key in ("original_max_position_embeddings", "truncate", "beta_fast", "beta_slow"):
            inner.pop(key, None)
    added = dict(rng.choice([each for each in ADDED if family == "gpt_oss" or "truncate" not in each]))
    added |= rng.choice([{}, {}, {"rope_theta": inner["rope_theta"]}, {"rope_theta": 3e4}])
    if rng.random() < 0.3 and "partial_rotary_factor" in inner:
        added["partial_rotary_factor"] = inner["partial_rotary_factor"]
    config["rope_scaling"] = added
    architecture = transformers.AutoModelForCausalLM._model_mapping[config_class].__name__
    config["architectures"] = [architecture]
    return config, config_class.from_dict(json.loads(json.dumps(config))).rope_parameters


@pytest.mark.parametrize("family", BOTH_SPELLINGS)
def test_scaling_added_beside_rope_parameters_is_that_of_transformers(family):
    print("seed 5")
    rng, outcomes = random.Random(5), set()
    for _ in range(60):
        config, theirs = recipe(family, rng)
        given, meant = (each.get(FULL, each) for each in (config["rope_parameters"], theirs))
        lost = [
            key
            for key, value in given.items()
            if value is not None and meant.get(key) != value and (key, value) != ("rope_type", "default")
        ]
        outcomes.add(bool(lost))
        if lost:
            with pytest.raises(CheckpointError, match=rf"rope_scaling\.({'|'.join(lost)}) is .* as rope_parameters"):
                parse_config(config)
            continue
        alone = {**config, "rope_scaling": None, "rope_parameters": theirs}
        assert parse_config(config) == parse_config(alone), config
    assert outcomes == {True, False}


def test_the_recipe_of_model_cards_needs_its_base():
    """The recipe of Qwen3's model card: with it, transformers itself would use the base 10,000."""
    config, _ = recipe("qwen3", random.Random(0))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1_000_000}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    expected = r"rope_scaling\.rope_theta is 10000\.0, but must be 1000000, the same as rope_pa"
    with pytest.raises(CheckpointError, match=expected):
        parse_config({**config, "rope_scaling": yarn})
    served = parse_config({**config, "rope_scaling": {**yarn, "rope_theta": 1_000_000}})
    assert (served.ropes[0].rope_type, served.ropes[0].theta, served.ropes[0].factor) == ("yarn", 1_000_000, 4.0)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("llama", {}, (0, 0)),
        ("mistral", {}, (20, 20)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("qwen2", WINDOWED | {"max_window_layers": 0, "layer_types": None}, (12, 12)),
        ("qwen2", WINDOWED | {"max_window_layers": 1, "layer_types": None}, (0, 12)),
        ("qwen2", WINDOWED | {"max_window_layers": 28, "layer_types": None}, (0, 0)),
        ("qwen2", WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}, (12, 0)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 12}, (0, 0)),
    ],
)
def test_windows_of_the_layers(tmp_path, family, fields, windows):
    edit_config(make_checkpoint(tmp_path, family, seed=20), **fields)
    assert tuple(heads.window for heads in load_config(tmp_path).layers) == windows


def test_gemma3_as_it_is_published_has_two_bases():
    """Transformers 4 stored the base of layers with a window under a separate name, and left defaults out."""
    published = {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6,
        "rope_theta": 1_000_000, "rope_local_base_freq": 20_000, "sliding_window": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    config = parse_config(published)
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [(20_000.0, 1.0)] * 5 + [(1_000_000.0, 8.0)]
    assert (config.heads.softcap, config.operations[-1].softcap) == (0.0, 0.0)


def test_mistral_without_a_window_in_its_config_has_the_published_one(tmp_path):
    config = read_config(make_checkpoint(tmp_path, "mistral", seed=21))
    del config["sliding_window"]
    assert [heads.window for heads in parse_config(config).layers] == [4096, 4096]


def test_positions_served(tmp_path):
    """Linear and yarn scaling extend the positions; llama3's configurations already contain the extended number."""
    config = read_config(make_checkpoint(tmp_path, "llama", seed=18))

    def num_positions(rope_parameters):
        return parse_config({**config, **rope_parameters}).max_position_embeddings

    assert num_positions({}) == num_positions(LLAMA3) == 1024
    assert num_positions(LINEAR) == 4096
    assert num_positions(rope("yarn", factor=4.0)) == 4096
    assert num_positions(YARN) == 1024


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, r"e MambaForCausalLM is not supported; docs/models\.md"),
        ("llama", {"architectures": None, "model_type": "bert"}, r'none \(model_type "bert"\) is not supported'),
        ("llama", {"is_causal": "no"}, r'is_causal is "no", but must be true or false'),
        ("mistral", {"is_causal": False, "sliding_window": 9}, r"is_causal is false, but must be true for a model w"),
        ("bloom", {"is_causal": False}, r"is_causal is false, .* sliding windows, block patterns or ALiBi"),
        ("phi3small", {"is_causal": False}, r"is_causal is false, .* a model with sliding windows, block patterns"),
        ("llama", {"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}, r"e X is not .*own code \(auto_map"),
        ("gpt2", {"quantization_config": {"quant_method": "gptq"}}, r'quantization_config is .*, but must be unset fo'),
        ("llama", {"use_sliding_window": True}, r"use_sliding_window is true, but must be false for LlamaForCausalLM"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r'layer_types is "sliding_attention"'),
        ("qwen3", {"layer_types": ["full_attention"]}, r"layer_types is .*, but must be a list as long as .*, 2"),
        ("qwen2", {**WINDOWED, "layer_types": ["chunked_attention", ""]}, r'"chunked_attention", .* or sliding_att'),
        ("qwen2", {**WINDOWED, "layer_types": None, "max_window_layers": -1}, r"max_window_layers is -1"),
        ("qwen2", {**WINDOWED, "sliding_window": 0}, r"sliding_window is 0, but must be a whole number"),
        ("mistral", {"sliding_window": "wide"}, r'sliding_window is "wide", but must be a whole number from 1'),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, r"layer_types is .*, but must be unset"),
        ("llama", rope("longrope", factor=2.0), r'rope_type is "longrope", but must be one of default, linear'),
        ("llama", rope("linear"), r"has no factor, a number from 1e-30 to"),
        ("llama", rope("default", partial_rotary_factor=0.5), r"partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"full_attention is .* all layers of"),
        ("llama", {"hidden_size": None}, r"has no hidden_size"),
        ("llama", {"num_hidden_layers": "2"}, r'num_hidden_layers is "2", but must be a whole number from 1 to 4096'),
        ("llama", {"num_key_value_heads": 3}, r"num_key_value_heads is 3, but must be a divisor of 4"),
        ("llama", {"rms_norm_eps": "small"}, r'rms_norm_eps is "small", but must be a number from 1e-30 to'),
        ("llama", rope("default", theta="big"), r'rope_theta is "big", but must be a number from 1e-30 to'),
        ("llama", {"head_dim": 15}, r"head_dim is 15, but must be even"),
        ("llama", {"hidden_act": "relu"}, r'hidden_act is "relu", but must be one of silu'),
        ("llama", {"dtype": "float8_e4m3fn"}, r'dtype is "float8_e4m3fn"'),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, r"no_rope_layers is .*, but must be a list of 0 and 1 as"),
        ("phi3", rope("linear", factor=2.0), r'rope_type is "linear", but must be default or longrope'),
        ("phi3", rope("longrope"), r"short_factor is null, but must be a list of 8 numbers"),
        ("glm4", rope("default", partial_rotary_factor=0.2), r"partial_rotary_factor is 0.2.* even number of 16"),
        ("glm4", rope("default", partial_rotary_factor=1.5), r"partial_rotary_factor is 1.5, but must be at most 1"),
        ("granite", {"residual_multiplier": 0}, r"residual_multiplier is 0, but must be a number"),
        ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is true, but must be false"),
        ("gemma3_text", {"use_bidirectional_attention": "all"}, r'"all", but must be true or false'),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, r"attn_logit_softcapping is 2.0, but must be null: Gemma"),
        ("gemma2", {"hidden_activation": "relu"}, r'hidden_activation is "relu", but must be one of gelu_pytorch_tanh'),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, r'layer_types is "chunked_attention", but must be full'),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, r'hidden_act is "quick_gelu", but must be one of gelu, gelu_fast'),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, r"_post_layernorm is true, but must be false"),
        ("bloom", {"n_head": 3}, r"hidden_size is 64, but must be a multiple of 3 attention heads"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, r'"multiquery_attention", but must be one of'),
        ("mpt", {"attn_config": {"alibi": False}}, r"alibi is false, but must be true"),
        ("mpt", {"attn_config": {"qk_ln": True}}, r"qk_ln is true, but must be false"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, r"prefix_lm is true, but must be false"),
        ("mpt", {"attn_config": {"clip_qkv": -1}}, r"clip_qkv is -1, but must be a number"),
        ("mpt", {"attn_config": {"sliding_window_size": 64}}, r"sliding_window_size is 64, but must be -1"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, r'logit_scale is "inv_sqrt_d_model", but must be null'),
        ("mpt", {"norm_type": "rmsnorm"}, r'norm_type is "rmsnorm", but must be one of low_precision_layernorm, lay'),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, but must be at most num_local_exp.*, 8"),
        ("mixtral", {"num_local_experts": 1}, r"num_experts_per_tok is 2, but must be at most num_local_experts, 1"),
        ("qwen2_moe", {"num_experts": 0}, r"num_experts is 0, but must be a whole number from 1 to 1024"),
        ("qwen3_moe", {"mlp_only_layers": ["last"]}, r'mlp_only_layers is \["last"\], but must be a list of layer'),
        ("glm4_moe", {"topk_group": 1}, r"topk_group is 1, but must be at most n_group, 4, with 3 experts at least"),
        ("glm4_moe", {"n_group": 3}, r"n_routed_experts is 8, but must be a multiple of n_group, 3"),
        ("glm4_moe", {"first_k_dense_replace": -1}, r"first_k_dense_replace is -1, but must be a whole number from 0"),
        ("olmoe", {"clip_qkv": -8.0}, r"clip_qkv is -8.0, but must be a number from 1e-30 to 1e\+30"),
        ("hunyuan_v1_dense", rope("dynamic", factor=2.0), r'rope_type is "dynamic", but must be one of default'),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, r"moe_norm_min is 0.1, but must be at most 1e-09"),
        ("ernie4_5_moe", {"num_experts_per_tok": 2}, r"moe_k is 3, but must be 2, as num_experts_per_tok is"),
        ("ernie4_5_moe", {"moe_k": 9}, r"moe_k is 9, but must be at most moe_num_experts, 8"),
        ("apertus", {"post_norm": True}, r"post_norm is true, but must be false"),
        ("afmoe", {"score_func": "softmax"}, r'score_func is "softmax", but must be one of sigmoid'),
        ("afmoe", {"n_group": 2}, r"n_group is 2, but must be a whole number from 1 to 1"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, r"use_qk_norm is false, but must be true"),
        ("llama4_text", {"num_experts_per_tok": 2}, r"num_experts_per_tok is 2, but must be 1"),
        ("llama4_text", {"moe_layers": "all"}, r'moe_layers is "all", but must be a list of layer numbers'),
        ("llama4_text", YARN, r'rope_type is "yarn", but must be default, linear or llama3'),
        ("phimoe", {"num_experts_per_tok": 1}, r"num_experts_per_tok is 1, but must be 2 for PhimoeForCausalLM"),
        ("phimoe", {"lm_head_bias": True, **TIED}, r"tie_word_embeddings is true, but must be false"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, r"parallel_attn is false, but must be"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, r"num_ln_in_parallel_attn is 2, but must be a whole number from 1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is true, but must be f"),
        ("gpt2", {"activation_function": "relu"}, r'activation_function is "relu", but must be one of gelu'),
        ("gpt2", {"n_embd": 65}, r"n_embd is 65, but must be a multiple of 4"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, family, fields, message):
    edit_config(make_checkpoint(tmp_path, family, seed=19), **fields)
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)
