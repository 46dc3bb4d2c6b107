"""Gemma 2 (Gemma team, 2024, https://arxiv.org/abs/2408.00118) and 3 (2025, https://arxiv.org/abs/2503.19786).

Norms on both sides of attention and MLP multiply by 1 + weight, and embeddings are scaled up. Gemma 2 bounds scores and
logits; Gemma 3 normalizes heads instead, and its layers with a sliding window have another base of positions.
"""

import math
from typing import Any

from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    HEAD_NORMS,
    LAYER,
    MLP_OUTPUT,
    OURS,
    QKV,
    Family,
    Weight,
    inside,
    read_decoder,
)
from pagewire.common.network.families.positions import FULL, SLIDING, read_ropes_by_kind, read_windows
from pagewire.common.network.families.reading import (
    attention_biases,
    expect,
    num_layers_of,
    number,
    number_or_none,
    positive,
    unserved,
)

_WEIGHTS = (
    EMBEDDING,
    Weight(f"{LAYER}.input_layernorm", f"{OURS}.attention_norm"),
    *QKV,
    ATTENTION_OUTPUT,
    Weight(f"{LAYER}.post_attention_layernorm", f"{OURS}.attention_post_norm"),
    Weight(f"{LAYER}.pre_feedforward_layernorm", f"{OURS}.mlp_norm"),
    *GATED_MLP,
    MLP_OUTPUT,
    Weight(f"{LAYER}.post_feedforward_layernorm", f"{OURS}.mlp_post_norm"),
    *HEAD,
)

# What files may leave out.
_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA3_DEFAULTS = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}


def _flags(config: JsonObject, attention_softcap: float, logits_softcap: float) -> dict[str, Any]:
    """What both share; the softcaps are those where config.json does not say."""
    if config.get("use_bidirectional_attention"):
        expect(config, "use_bidirectional_attention", False)
    return {
        **attention_biases(config),
        "activation_key": "hidden_activation",
        "activations": ("gelu_pytorch_tanh",),
        "norm_adds_one": True,
        "post_norm": True,
        "embedding_multiplier": math.sqrt(positive(config, "hidden_size")),
        "attention_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": number_or_none(config, "attn_logit_softcapping", attention_softcap),
        "logits_softcap": number_or_none(config, "final_logit_softcapping", logits_softcap),
    }


def _read_gemma2(config: JsonObject, architecture: str) -> ModelConfig:
    _, windows = read_windows(config, [FULL if layer % 2 else SLIDING for layer in range(num_layers_of(config))])
    return read_decoder(config, architecture, windows=windows, **_flags(config, 50.0, 30.0))


def _read_gemma3(config: JsonObject, architecture: str) -> ModelConfig:
    interval = positive(config, "sliding_window_pattern", 6)
    kinds = [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers_of(config))]
    layer_types, windows = read_windows(config, kinds)
    thetas = {FULL: 1_000_000.0, SLIDING: number(config, "rope_local_base_freq", 10_000.0)}
    ropes, _ = read_ropes_by_kind(config, layer_types, thetas, shares_theta=False)
    # The positions that config.json names are those that scaling has stretched.
    num_positions = positive(config, "max_position_embeddings")
    flags = _flags(config, 0.0, 0.0)
    if flags["attention_softcap"]:
        raise unserved("attn_logit_softcapping", flags["attention_softcap"], "null: Gemma 3 normalizes heads instead")
    return read_decoder(config, architecture, ropes=(ropes, num_positions), windows=windows, qk_norm="head", **flags)


GEMMA2 = Family(("Gemma2ForCausalLM",), _read_gemma2, _WEIGHTS, defaults=_DEFAULTS)
GEMMA3 = Family(("Gemma3ForCausalLM",), _read_gemma3, (*_WEIGHTS, *HEAD_NORMS), defaults=_GEMMA3_DEFAULTS)
GEMMA3_WITH_VISION = inside(GEMMA3, "Gemma3ForConditionalGeneration", ("gemma3_text",))
