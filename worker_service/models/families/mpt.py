"""MPT (MosaicML, 2023, https://www.databricks.com/blog/mpt-7b).

No positions, but scores that fall by the distance (ALiBi), by slopes of its own; layer norms that have no bias, as
nothing has; and queries, keys and values that may be bounded.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from worker_service.models.families.family import Family, Weight
from worker_service.models.families.reading import (
    choice,
    dtype,
    expect,
    flag,
    json_object,
    number,
    positive,
    split_evenly,
    unserved,
)
from worker_service.models.quantization import parse_quantization
from worker_service.models.shard import Split

_LAYER, _OURS = "transformer.blocks.{layer}", "layers.{layer}"
_WEIGHTS = (
    Weight("transformer.wte", "embedding"),
    Weight(f"{_LAYER}.norm_1", f"{_OURS}.attention_norm"),
    Weight(f"{_LAYER}.attn.Wqkv", f"{_OURS}.attention.qkv", split=Split.HEADS),
    Weight(f"{_LAYER}.attn.out_proj", f"{_OURS}.attention.output", split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.norm_2", f"{_OURS}.mlp_norm"),
    Weight(f"{_LAYER}.ffn.up_proj", f"{_OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.ffn.down_proj", f"{_OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.norm_f", "norm"),
    Weight("lm_head", "head", split=Split.VOCABULARY),
)
# What attention is served without.
_WITHOUT = ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id")


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    attention = _attention(config)
    if config.get("logit_scale") is not None:
        raise unserved("logit_scale", config["logit_scale"], "null")
    choice(config, "norm_type", "low_precision_layernorm", ("low_precision_layernorm", "layernorm"))
    hidden_size, num_heads = positive(config, "d_model"), positive(config, "n_heads")
    num_layers = positive(config, "n_layers", limit=MAX_LAYERS)
    head_dim = split_evenly("d_model", hidden_size, num_heads)
    has_bias = not flag(config, "no_bias", True)
    ratio = positive(config, "expansion_ratio", 4, limit=MAX_SIZE // hidden_size)
    is_clipped = attention.get("clip_qkv") not in (None, 0)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=ratio * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        max_position_embeddings=positive(config, "max_seq_len"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * num_layers,
        windows=(0,) * num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        dtype=dtype(config),
        attention_scale=number(attention, "softmax_scale", head_dim**-0.5),
        quantization=parse_quantization(config),
        alibi_slopes=_slopes(num_heads, positive(attention, "alibi_bias_max", 8)),
        norm="layer",
        norm_bias=has_bias,
        qkv_bias=has_bias,
        qkv_limit=number(attention, "clip_qkv") if is_clipped else 0.0,
        output_bias=has_bias,
        is_gated=False,
        activation="gelu",
        mlp_bias=has_bias,
    )


def _attention(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of attention, where that is served."""
    attention = json_object(config, "attn_config")
    choice(attention, "attn_type", "multihead_attention", ("multihead_attention",))
    expect(attention, "alibi", True)
    for key in _WITHOUT:
        expect(attention, key, False)
    if attention.get("sliding_window_size", -1) != -1:
        raise unserved("sliding_window_size", attention["sliding_window_size"], "-1")
    return attention


def _slopes(num_heads: int, bias_max: int) -> tuple[float, ...]:
    """2^(-bias_max / n), 2^(-2 bias_max / n) ... of the smallest power of two n that suffices; where it is not the
    number of heads, every other of these first, from the second on, then the others."""
    num_slopes = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * number / num_slopes) for number in range(1, num_slopes + 1)]
    return tuple(slopes if num_slopes == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])


# The first name is that of transformers, the second that of the published files.
FAMILY = Family(("MptForCausalLM", "MPTForCausalLM"), _read, _WEIGHTS, optional_prefix="transformer.")
