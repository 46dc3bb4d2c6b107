"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"): learnt positions, layer norms,
and a plain MLP."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import MAX_LAYERS, ModelConfig
from worker_service.models.families.family import Family, Weight
from worker_service.models.families.reading import (
    GELUS,
    activation,
    dtype,
    expect,
    flag,
    number,
    positive,
    split_evenly,
    unserved,
)
from worker_service.models.shard import Split

_ARCHITECTURE = "GPT2LMHeadModel"
_LAYER, _OURS = "transformer.h.{layer}", "layers.{layer}"
# Linear layers were 1-d convolutions: their weights are [in, out].
_WEIGHTS = (
    Weight("transformer.wte", "embedding"),
    Weight("transformer.wpe", "position_embedding"),
    Weight(f"{_LAYER}.ln_1", f"{_OURS}.attention_norm"),
    Weight(f"{_LAYER}.attn.c_attn", f"{_OURS}.attention.qkv", is_transposed=True, split=Split.HEADS),
    Weight(f"{_LAYER}.attn.c_proj", f"{_OURS}.attention.output", is_transposed=True, split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.ln_2", f"{_OURS}.mlp_norm"),
    Weight(f"{_LAYER}.mlp.c_fc", f"{_OURS}.mlp.up", is_transposed=True, split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.mlp.c_proj", f"{_OURS}.mlp.down", is_transposed=True, split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.ln_f", "norm"),
    Weight("lm_head", "head", split=Split.VOCABULARY),
)


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    if config.get("quantization_config"):
        raise unserved("quantization_config", config["quantization_config"], f"unset for {_ARCHITECTURE}")
    if config.get("use_sliding_window"):
        raise unserved("use_sliding_window", True, f"false for {_ARCHITECTURE}")
    expect(config, "scale_attn_weights", True)
    expect(config, "scale_attn_by_inverse_layer_idx", False)
    expect(config, "add_cross_attention", False)
    hidden_size, num_heads = positive(config, "n_embd"), positive(config, "n_head")
    num_layers = positive(config, "n_layer", limit=MAX_LAYERS)
    head_dim = split_evenly("n_embd", hidden_size, num_heads)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=positive(config, "n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        max_position_embeddings=positive(config, "n_positions"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * num_layers,
        windows=(0,) * num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        dtype=dtype(config),
        attention_scale=head_dim**-0.5,
        has_position_embedding=True,
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        is_gated=False,
        activation=activation(config, "activation_function", "gelu_new", GELUS),
        mlp_bias=True,
    )


# Old checkpoints carry the causal mask of every layer.
FAMILY = Family((_ARCHITECTURE,), _read, _WEIGHTS, ignored=r"\.attn\.(masked_)?bias$", optional_prefix="transformer.")
