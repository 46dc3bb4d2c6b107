"""OLMo 2 (OLMo team, 2024, https://arxiv.org/abs/2501.00656) and OLMo 3 (2025, https://arxiv.org/abs/2512.13961).

They have norms behind attention and MLP instead of before them, and one over all heads of queries, and one over all of
keys. In OLMo 3 three layers of four have a sliding window, and only the fourth stretches its positions.

OLMoE (2024, https://arxiv.org/abs/2409.02060) has norms before them, those over all heads too, and experts.
"""

from typing import Any

from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    GATED_MLP,
    HEAD,
    LAYER,
    MLP_OUTPUT,
    OURS,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Split,
    Weight,
    read_decoder,
    read_experts,
)
from pagewire.common.network.families.positions import FULL, SLIDING, read_ropes_by_kind, read_windows
from pagewire.common.network.families.reading import attention_biases, flag, num_layers_of, number

_ATTENTION = (
    EMBEDDING,
    *QKV,
    Weight(f"{LAYER}.self_attn.q_norm", f"{OURS}.attention.query_norm", split=Split.HEADS),
    Weight(f"{LAYER}.self_attn.k_norm", f"{OURS}.attention.key_norm", split=Split.KV_HEADS),
    ATTENTION_OUTPUT,
    *HEAD,
)
_WEIGHTS = (
    *_ATTENTION,
    Weight(f"{LAYER}.post_attention_layernorm", f"{OURS}.attention_post_norm"),
    *GATED_MLP,
    MLP_OUTPUT,
    Weight(f"{LAYER}.post_feedforward_layernorm", f"{OURS}.mlp_post_norm"),
)


def _flags(config: JsonObject) -> dict[str, Any]:
    return {
        **attention_biases(config),
        "default_eps": 1e-5,
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": "projection",
    }


def _read_olmo2(config: JsonObject, architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, **_flags(config))


def _read_olmo3(config: JsonObject, architecture: str) -> ModelConfig:
    kinds = [FULL if layer % 4 == 3 else SLIDING for layer in range(num_layers_of(config))]
    layer_types, windows = read_windows(config, kinds)
    ropes = read_ropes_by_kind(config, layer_types, {FULL: 500_000.0, SLIDING: 500_000.0})
    return read_decoder(config, architecture, ropes=ropes, windows=windows, **_flags(config))


def _read_olmoe(config: JsonObject, architecture: str) -> ModelConfig:
    experts = read_experts(
        config, intermediate_key="intermediate_size", renormalizes=flag(config, "norm_topk_prob", False)
    )
    limit = 0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv")
    flags = {**_flags(config), "pre_norm": True, "post_norm": False, "qkv_limit": limit}
    expert_layers = (True,) * num_layers_of(config)
    return read_decoder(config, architecture, experts=experts, expert_layers=expert_layers, **flags)


OLMO2 = Family(("Olmo2ForCausalLM",), _read_olmo2, _WEIGHTS)
OLMO3 = Family(("Olmo3ForCausalLM",), _read_olmo3, _WEIGHTS)
OLMOE = Family(
    ("OlmoeForCausalLM",),
    _read_olmoe,
    (*_ATTENTION, *PRE_NORMS, ROUTER, *EXPERTS),
)
