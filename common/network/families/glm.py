"""GLM-4 (Zeng et al., 2024, https://arxiv.org/abs/2406.12793).

As "glm" it has norms before attention and MLP, as "glm4" behind them too. A half of each head is turned, in pairs of
neighbours.

GLM-4.5 (2025, https://arxiv.org/abs/2508.06471), "glm4_moe", has norms before them, pairs of elements of two halves,
and experts behind its first layers, as DeepSeek-V3 has them. What it has for predicting several tokens is left alone.
"""

from pagewire.common.gguf import is_whole
from pagewire.common.network.config import MAX_EXPERTS, MAX_LAYERS, JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    GATED_MLP,
    HEAD,
    HEAD_NORMS,
    LAYER,
    MERGED_MLP,
    MLP_OUTPUT,
    OURS,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Weight,
    in_dense_layers,
    read_decoder,
    read_experts,
    shared_expert,
)
from pagewire.common.network.families.positions import read_rope
from pagewire.common.network.families.reading import (
    first_key,
    flag,
    from_zero,
    num_layers_of,
    number,
    positive,
    unserved,
)

_WEIGHTS = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *MERGED_MLP, MLP_OUTPUT, *HEAD)
_POST_NORMS = (
    Weight(f"{LAYER}.post_self_attn_layernorm", f"{OURS}.attention_post_norm"),
    Weight(f"{LAYER}.post_mlp_layernorm", f"{OURS}.mlp_post_norm"),
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


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    return read_decoder(
        config,
        architecture,
        ropes=read_rope(config, default_share=0.5, is_interleaved=True),
        default_eps=1.5625e-7,
        qkv_bias=flag(config, "attention_bias", True),
        post_norm=architecture == "Glm4ForCausalLM",
    )


def _read_moe(config: JsonObject, architecture: str) -> ModelConfig:
    ropes = read_rope(config, default_share=0.5)
    num_dense = from_zero(config, "first_k_dense_replace", 1)
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
        ropes=ropes,
        default_eps=1e-5,
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm="head" if flag(config, "use_qk_norm", False) else "none",
        experts=experts,
        expert_layers=tuple(layer >= num_dense for layer in range(num_layers_of(config))),
        num_further_layers=num_further,
    )


# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}
GLM = Family(("GlmForCausalLM",), _read, _WEIGHTS, defaults=_DEFAULTS)
GLM4 = Family(("Glm4ForCausalLM",), _read, (*_WEIGHTS, *_POST_NORMS), defaults=_DEFAULTS)
GLM4_MOE = Family(("Glm4MoeForCausalLM",), _read_moe, (*_MOE_WEIGHTS, *EXPERTS))
