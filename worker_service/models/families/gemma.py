"""Gemma 2 (Gemma team, 2024, https://arxiv.org/abs/2408.00118) and 3 (2025, https://arxiv.org/abs/2503.19786).

Norms on both sides of attention and MLP multiply by 1 + weight, and embeddings are scaled up. Gemma 2 bounds scores and
logits; Gemma 3 normalizes heads instead, and its layers with a sliding window have another base of positions.
"""

import math
from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    HEAD_NORMS,
    MLP_OUTPUT,
    QKV,
    Family,
    Weight,
    num_layers_of,
    read_decoder,
)
from worker_service.models.families.positions import FULL, SLIDING, read_ropes_by_kind, read_windows
from worker_service.models.families.reading import expect, flag, number, number_or_none, positive, unserved

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_WEIGHTS = (
    EMBEDDING,
    Weight(f"{_LAYER}.input_layernorm", f"{_OURS}.attention_norm"),
    *QKV,
    ATTENTION_OUTPUT,
    Weight(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.attention_post_norm"),
    Weight(f"{_LAYER}.pre_feedforward_layernorm", f"{_OURS}.mlp_norm"),
    *GATED_MLP,
    MLP_OUTPUT,
    Weight(f"{_LAYER}.post_feedforward_layernorm", f"{_OURS}.mlp_post_norm"),
    *HEAD,
)

# What files may leave out.
_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA3_DEFAULTS = {"vocab_size": 262_208, "max_position_embeddings": 131_072}


def _flags(config: Mapping[str, Any], attention_softcap: float, logits_softcap: float) -> dict[str, Any]:
    """What both share; the softcaps are those where config.json does not say."""
    if config.get("use_bidirectional_attention"):
        expect(config, "use_bidirectional_attention", False)
    has_bias = flag(config, "attention_bias", False)
    return {
        "activation_key": "hidden_activation",
        "activations": ("gelu_pytorch_tanh",),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "norm_adds_one": True,
        "post_norm": True,
        "embedding_multiplier": math.sqrt(positive(config, "hidden_size")),
        "attention_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": number_or_none(config, "attn_logit_softcapping", attention_softcap),
        "logits_softcap": number_or_none(config, "final_logit_softcapping", logits_softcap),
    }


def _read_gemma2(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    num_layers = num_layers_of(config)
    _, windows = read_windows(config, num_layers, [FULL if layer % 2 else SLIDING for layer in range(num_layers)])
    return read_decoder(config, architecture, windows=windows, **_flags(config, 50.0, 30.0))


def _read_gemma3(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **_GEMMA3_DEFAULTS, **config}
    num_layers = num_layers_of(config)
    interval = positive(config, "sliding_window_pattern", 6)
    kinds = [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers)]
    layer_types, windows = read_windows(config, num_layers, kinds)
    # The positions that config.json names are those that scaling has stretched.
    num_positions = positive(config, "max_position_embeddings")
    thetas = {FULL: 1_000_000.0, SLIDING: number(config, "rope_local_base_freq", 10_000.0)}
    ropes, _ = read_ropes_by_kind(config, num_positions, thetas, shares_theta=False)
    of_layers = tuple(ropes[layer_type] for layer_type in layer_types)
    flags = _flags(config, 0.0, 0.0)
    if flags["attention_softcap"]:
        raise unserved("attn_logit_softcapping", flags["attention_softcap"], "null: Gemma 3 normalizes heads instead")
    return read_decoder(
        config, architecture, ropes=(of_layers, num_positions), windows=windows, qk_norm="head", **flags
    )


GEMMA2 = Family(("Gemma2ForCausalLM",), _read_gemma2, _WEIGHTS)
GEMMA3 = Family(("Gemma3ForCausalLM",), _read_gemma3, (*_WEIGHTS, *HEAD_NORMS))
