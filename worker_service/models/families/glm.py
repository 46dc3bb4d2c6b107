"""GLM-4 (Zeng et al., 2024, https://arxiv.org/abs/2406.12793).

As "glm" it has norms before attention and MLP, as "glm4" behind them too. A half of each head is turned, in pairs of
neighbours.

GLM-4.5 (2025, https://arxiv.org/abs/2508.06471), "glm4_moe", has norms before them, pairs of elements of two halves,
and experts behind its first layers, as DeepSeek-V3 has them. What it has for predicting several tokens is left alone.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    GATED_MLP,
    HEAD,
    HEAD_NORMS,
    MERGED_MLP,
    MLP_OUTPUT,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Weight,
    in_dense_layers,
    num_layers_of,
    read_decoder,
    read_experts,
    shared_expert,
)
from worker_service.models.families.positions import read_rope
from worker_service.models.families.reading import first_key, flag, is_whole, number, positive, unserved

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_WEIGHTS = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *MERGED_MLP, MLP_OUTPUT, *HEAD)
_POST_NORMS = (
    Weight(f"{_LAYER}.post_self_attn_layernorm", f"{_OURS}.attention_post_norm"),
    Weight(f"{_LAYER}.post_mlp_layernorm", f"{_OURS}.mlp_post_norm"),
)
_MOE_WEIGHTS = (
    EMBEDDING,
    *PRE_NORMS,
    *QKV,
    *HEAD_NORMS,
    ATTENTION_OUTPUT,
    *in_dense_layers((*GATED_MLP, MLP_OUTPUT)),
    *HEAD,
    ROUTER,
    *shared_expert("shared_experts"),
)

# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    num_layers = num_layers_of(config)
    rope, num_positions = read_rope(
        config, positive(config, "max_position_embeddings"), default_share=0.5, is_interleaved=True
    )
    return read_decoder(
        config,
        architecture,
        ropes=((rope,) * num_layers, num_positions),
        default_eps=1.5625e-7,
        qkv_bias=flag(config, "attention_bias", True),
        post_norm=architecture == "Glm4ForCausalLM",
    )


def _read_moe(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    num_layers = num_layers_of(config)
    rope, num_positions = read_rope(config, positive(config, "max_position_embeddings"), default_share=0.5)
    num_dense = config.get("first_k_dense_replace", 1)
    if not is_whole(num_dense) or num_dense < 0:
        raise unserved("first_k_dense_replace", num_dense, "a whole number from 0")
    further_key = first_key(config, "num_nextn_predict_layers", "num_mtp_layers")
    num_further = 1 if config.get(further_key) is None else config[further_key]
    if not is_whole(num_further) or not 0 <= num_further <= MAX_LAYERS:
        raise unserved(further_key, num_further, f"a whole number from 0 to {MAX_LAYERS}")
    num_shared = positive(config, "n_shared_experts", 1, limit=MAX_EXPERTS)
    experts = read_experts(
        config,
        "n_routed_experts",
        scoring="sigmoid",
        renormalizes=flag(config, "norm_topk_prob", True),
        factor=number(config, "routed_scaling_factor", 1.0),
        num_groups=positive(config, "n_group", 1, limit=MAX_EXPERTS),
        num_chosen_groups=positive(config, "topk_group", 1, limit=MAX_EXPERTS),
        has_correction=True,
        shared_intermediate_size=num_shared * positive(config, "moe_intermediate_size"),
    )
    return read_decoder(
        config,
        architecture,
        ropes=((rope,) * num_layers, num_positions),
        default_eps=1e-5,
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm="head" if flag(config, "use_qk_norm", False) else "none",
        experts=experts,
        expert_layers=tuple(layer >= num_dense for layer in range(num_layers)),
        num_further_layers=num_further,
    )


GLM = Family(("GlmForCausalLM",), _read, _WEIGHTS)
GLM4 = Family(("Glm4ForCausalLM",), _read, (*_WEIGHTS, *_POST_NORMS))
GLM4_MOE = Family(("Glm4MoeForCausalLM",), _read_moe, (*_MOE_WEIGHTS, *EXPERTS))
