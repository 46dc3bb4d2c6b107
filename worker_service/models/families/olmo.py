"""OLMo 2 (OLMo team, 2024, https://arxiv.org/abs/2501.00656) and OLMo 3 (2025, https://arxiv.org/abs/2512.13961).

They have norms behind attention and MLP instead of before them, and one over all heads of queries, and one over all of
keys. In OLMo 3 three layers of four have a sliding window, and only the fourth stretches its positions.

OLMoE (2024, https://arxiv.org/abs/2409.02060) has norms before them, those over all heads too, and experts.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    GATED_MLP,
    HEAD,
    MLP_OUTPUT,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Weight,
    num_layers_of,
    read_decoder,
    read_experts,
)
from worker_service.models.families.positions import FULL, SLIDING, read_ropes_by_kind, read_windows
from worker_service.models.families.reading import flag, number, positive
from worker_service.models.shard import Split

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_ATTENTION = (
    EMBEDDING,
    *QKV,
    Weight(f"{_LAYER}.self_attn.q_norm", f"{_OURS}.attention.query_norm", split=Split.HEADS),
    Weight(f"{_LAYER}.self_attn.k_norm", f"{_OURS}.attention.key_norm", split=Split.KV_HEADS),
    ATTENTION_OUTPUT,
    *HEAD,
)
_WEIGHTS = (
    *_ATTENTION,
    Weight(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.attention_post_norm"),
    *GATED_MLP,
    MLP_OUTPUT,
    Weight(f"{_LAYER}.post_feedforward_layernorm", f"{_OURS}.mlp_post_norm"),
)


def _flags(config: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = flag(config, "attention_bias", False)
    return {
        "default_eps": 1e-5,
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": "projection",
        "qkv_bias": has_bias,
        "output_bias": has_bias,
    }


def _read_olmo2(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, **_flags(config))


def _read_olmo3(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    num_layers = num_layers_of(config)
    kinds = [FULL if layer % 4 == 3 else SLIDING for layer in range(num_layers)]
    layer_types, windows = read_windows(config, num_layers, kinds)
    thetas = {FULL: 500_000.0, SLIDING: 500_000.0}
    ropes, num_positions = read_ropes_by_kind(config, positive(config, "max_position_embeddings"), thetas)
    of_layers = tuple(ropes[layer_type] for layer_type in layer_types)
    return read_decoder(config, architecture, ropes=(of_layers, num_positions), windows=windows, **_flags(config))


def _read_olmoe(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    num_layers = num_layers_of(config)
    experts = read_experts(
        config, intermediate_key="intermediate_size", renormalizes=flag(config, "norm_topk_prob", False)
    )
    limit = 0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv")
    flags = {**_flags(config), "pre_norm": True, "post_norm": False, "qkv_limit": limit}
    return read_decoder(config, architecture, experts=experts, expert_layers=(True,) * num_layers, **flags)


OLMO2 = Family(("Olmo2ForCausalLM",), _read_olmo2, _WEIGHTS)
OLMO3 = Family(("Olmo3ForCausalLM",), _read_olmo3, _WEIGHTS)
OLMOE = Family(
    ("OlmoeForCausalLM",),
    _read_olmoe,
    (*_ATTENTION, *PRE_NORMS, ROUTER, *EXPERTS),
)
