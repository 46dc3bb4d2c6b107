"""Creates small random checkpoints of every family, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from testing.checkpoints import phi3small

FIRST_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
FAMILIES = (
    *FIRST_FAMILIES,
    "smollm3",
    "phi3",
    "granite",
    "ministral3",
    "olmo2",
    "olmo3",
    "seed_oss",
    "glm",
    "glm4",
    "gemma2",
    "gemma3_text",
    "starcoder2",
    "gpt_neox",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "bloom",
    "mpt",
    "gpt_oss",
    "glm4_moe",
    "gemma",
    "exaone4",
    "cohere",
    "cohere2",
    "stablelm",
    "ernie4_5",
    "arcee",
    "granitemoehybrid",
    "opt",
    "minimax_m2",
    "dots1",
    "olmo",
    "falcon",
    "phimoe",
    "hunyuan_v1_dense",
    "ernie4_5_moe",
    "apertus",
    "phi3small",
    "llama4_text",
    "afmoe",
    "lfm2",
    "qwen3_5_text",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
)
# The families whose layers have states.
WITH_STATES = ("lfm2", "qwen3_5_text", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next")

DECODER = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
# For families whose heads always have the size hidden_size / num_attention_heads.
PLAIN_HEADS = {key: value for key, value in DECODER.items() if key != "head_dim"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
# With a larger epsilon, norms of heads do not amplify the rounding errors of heads with small values.
DELTA_NET = {
    **{"linear_num_value_heads": 12, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "rms_norm_eps": 1e-3,
}
# Keyed by transformers' model types. There is no end token, so that greedy continuations have the requested length.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": {**DECODER, "sliding_window": 20},
    "qwen2": DECODER,
    "qwen3": DECODER,
    "smollm3": {**DECODER, "num_hidden_layers": 4},
    "phi3": {**DECODER, "sliding_window": 20},
    "granite": {
        **DECODER,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "ministral3": {
        **DECODER,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "olmo2": DECODER,
    "olmo3": {**DECODER, "num_hidden_layers": 4, "sliding_window": 20},
    "seed_oss": DECODER,
    "glm": DECODER,
    "glm4": DECODER,
    "gemma2": {**DECODER, "sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**DECODER, "num_hidden_layers": 6, "sliding_window": 20, "query_pre_attn_scalar": 24},
    "starcoder2": {**DECODER, "sliding_window": 20},
    "gpt_neox": {key: value for key, value in PLAIN_HEADS.items() if key != "num_key_value_heads"},
    "qwen3_moe": {**DECODER, **EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**DECODER, "num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 96},
    "glm4_moe": {
        **DECODER,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        **DECODER,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": 1.5,  # within the range of gate values, so that clamping has an effect
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    },
    "gemma": DECODER,
    "exaone4": {**DECODER, "num_hidden_layers": 4, "sliding_window": 20},
    "cohere": {**PLAIN_HEADS, "logit_scale": 0.3},
    "cohere2": {**PLAIN_HEADS, "num_hidden_layers": 4, "sliding_window": 20},
    "stablelm": PLAIN_HEADS,
    "ernie4_5": DECODER,
    "arcee": DECODER,
    "granitemoehybrid": {
        **PLAIN_HEADS,
        "num_local_experts": 0,
        "time_step_limit": [0.0, 100.0],
        "layer_types": ["full_attention"] * 2,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "opt": {
        **{"vocab_size": 151, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"max_position_embeddings": 1024, "word_embed_proj_dim": 64},
    },
    "minimax_m2": {**DECODER, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "dots1": {
        **{**DECODER, "num_hidden_layers": 3, "sliding_window": 20, "max_window_layers": 2},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    },
    "olmo": {**PLAIN_HEADS, "clip_qkv": 1.0},
    "falcon": {"vocab_size": 151, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "phi3small": phi3small.SMALL,
    "phimoe": {**DECODER, "num_local_experts": 4, "router_jitter_noise": 0.3},
    "hunyuan_v1_dense": {
        **DECODER,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0},
    },
    "ernie4_5_moe": {
        **{**PLAIN_HEADS, "num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32},
        **{"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    },
    "apertus": DECODER,
    "llama4_text": {
        **{**DECODER, "num_hidden_layers": 4, "num_local_experts": 4, "attention_chunk_size": 1024},
        **{"intermediate_size_mlp": 80, "moe_layers": [0, 2, 3], "floor_scale": 8, "attn_scale": 0.4},
    },
    "afmoe": {
        **{**DECODER, **EXPERTS, "num_hidden_layers": 4, "num_dense_layers": 1, "num_shared_experts": 2},
        **{"route_scale": 1.5, "sliding_window": 20, "mup_enabled": True},
    },
    "lfm2": {
        **{**PLAIN_HEADS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        **{"block_multiple_of": 48},
    },
    "qwen3_5_text": {
        **{**DECODER, **DELTA_NET, "num_hidden_layers": 3, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2_moe": {
        **{**PLAIN_HEADS, **EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        **{"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    },
    "qwen3_5_moe_text": {
        **{**DECODER, **EXPERTS, **DELTA_NET, "num_hidden_layers": 2, "partial_rotary_factor": 0.5},
        **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 96},
    },
    "qwen3_next": {
        **{**DECODER, **EXPERTS, **DELTA_NET, "num_hidden_layers": 3, "partial_rotary_factor": 0.5},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_only_layers": [0]},
        "shared_expert_intermediate_size": 96,
    },
    "bloom": {"vocab_size": 151, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {
        **{"vocab_size": 151, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
        "attn_config": {"clip_qkv": 1.0},
    },
    "gpt2": {"vocab_size": 151, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}
NUM_EXPERTS = {"qwen3_moe": 8, "mixtral": 4, "olmoe": 8, "qwen2_moe": 8, "gpt_oss": 4, "glm4_moe": 8} | {
    "minimax_m2": 8,
    "dots1": 8,
    "phimoe": 4,
    "ernie4_5_moe": 8,
    "llama4_text": 4,
    "afmoe": 8,
    "lfm2_moe": 8,
    "qwen3_5_moe_text": 8,
    "qwen3_next": 8,
}
ADDING_ONE = ("gemma", "qwen3_5", "qwen3_next")  # 1 is added to the weights of norms
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def make_checkpoint(
    directory: Path, family: str, *, seed: int, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a random model of a family to `directory` and return the directory.

    The weights are scaled so that every layer affects the result and logits differ by several units. Near ties are then
    rare, and greedy continuations do not repeat at once.

    Args:
        family: one of FAMILIES.
        seed: the seed of the random weights.
        dtype: the dtype in which the weights are stored.
        max_shard_size: a value below the size of the weights, such as "100KB", splits them into several files with an
            index.
        overrides: fields of the transformers configuration, such as num_key_value_heads=1.
    """
    config_class = transformers.AutoConfig.for_model(family).__class__
    config = config_class(**{**DEFAULTS[family], **NO_SPECIAL_TOKENS, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed)
    model.generation_config = transformers.GenerationConfig()
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return Path(directory)


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> None:
    """Fill a transformers model with the random weights that `make_checkpoint` describes."""
    generator = torch.Generator().manual_seed(seed)
    corrections = [
        named for named in model.named_buffers() if named[0].endswith(("e_score_correction_bias", ".expert_bias"))
    ]
    for name, parameter in [*model.named_parameters(), *corrections]:
        noise = torch.randn(parameter.shape, generator=generator)
        adds_one = model.config.model_type.startswith(ADDING_ONE) and not name.endswith("linear_attn.norm.weight")
        parameter.copy_(_scaled(name, noise, around=0 if adds_one else 1))


def _scaled(name: str, noise: torch.Tensor, around: int) -> torch.Tensor:
    """Return the weight for a parameter's noise. `around` is the mean of norm weights."""
    if noise.dim() == 1:
        is_scale = name.endswith("weight")  # the weight of a norm
        return around + 0.1 * noise if is_scale else 0.2 * noise
    if any(part in name for part in ("embed_tokens", "wte", "wpe", "lm_head", "embed_in", "embed_out", "word_emb")):
        return 0.4 * noise
    fan_in = noise.shape[0] if "c_" in name else noise.shape[-1]  # GPT-2's layers are [in, out]
    return 1.5 * fan_in**-0.5 * noise
