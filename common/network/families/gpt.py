"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"): layer norms, a plain MLP, and
learnt positions; and two of its shape without positions, whose scores fall by the distance (ALiBi).

BLOOM (Le Scao et al., 2022, https://arxiv.org/abs/2211.05100) has a norm behind the embedding; its queries, keys and
values are one product, head by head. MPT (MosaicML, 2023, https://www.databricks.com/blog/mpt-7b) has slopes of its
own, layer norms that have no bias, as nothing has, and queries, keys and values that may be bounded.
"""

from typing import Any

from pagewire.common.network.config import MAX_LAYERS, MAX_SIZE, JsonObject, ModelConfig
from pagewire.common.network.families.family import OURS, Family, Split, Weight
from pagewire.common.network.families.reading import (
    GELUS,
    activation,
    choice,
    dtype,
    expect,
    first_key,
    flag,
    json_object,
    number,
    positive,
    split_evenly,
    unserved,
)
from pagewire.common.network.quantization import parse_quantization

_GPT2 = "GPT2LMHeadModel"
_LAYER, _MPT_LAYER = "transformer.h.{layer}", "transformer.blocks.{layer}"
_HEAD = Weight("lm_head", "head", split=Split.VOCABULARY)
# Linear layers were 1-d convolutions: their weights are [in, out].
_GPT2_WEIGHTS = (
    Weight("transformer.wte", "embedding"),
    Weight("transformer.wpe", "position_embedding"),
    Weight(f"{_LAYER}.ln_1", f"{OURS}.attention_norm"),
    Weight(f"{_LAYER}.attn.c_attn", f"{OURS}.attention.qkv", is_transposed=True, split=Split.HEADS),
    Weight(f"{_LAYER}.attn.c_proj", f"{OURS}.attention.output", is_transposed=True, split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.ln_2", f"{OURS}.mlp_norm"),
    Weight(f"{_LAYER}.mlp.c_fc", f"{OURS}.mlp.up", is_transposed=True, split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.mlp.c_proj", f"{OURS}.mlp.down", is_transposed=True, split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.ln_f", "norm"),
    _HEAD,
)
_BLOOM_WEIGHTS = (
    Weight("transformer.word_embeddings", "embedding"),
    Weight("transformer.word_embeddings_layernorm", "embedding_norm"),
    Weight(f"{_LAYER}.input_layernorm", f"{OURS}.attention_norm"),
    Weight(f"{_LAYER}.self_attention.query_key_value", f"{OURS}.attention.qkv", split=(Split.QKV_BY_HEAD,)),
    Weight(f"{_LAYER}.self_attention.dense", f"{OURS}.attention.output", split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.post_attention_layernorm", f"{OURS}.mlp_norm"),
    Weight(f"{_LAYER}.mlp.dense_h_to_4h", f"{OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.mlp.dense_4h_to_h", f"{OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.ln_f", "norm"),
    _HEAD,
)
_MPT_WEIGHTS = (
    Weight("transformer.wte", "embedding"),
    Weight(f"{_MPT_LAYER}.norm_1", f"{OURS}.attention_norm"),
    Weight(f"{_MPT_LAYER}.attn.Wqkv", f"{OURS}.attention.qkv", split=Split.HEADS),
    Weight(f"{_MPT_LAYER}.attn.out_proj", f"{OURS}.attention.output", split=Split.HEADS, axis=1),
    Weight(f"{_MPT_LAYER}.norm_2", f"{OURS}.mlp_norm"),
    Weight(f"{_MPT_LAYER}.ffn.up_proj", f"{OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{_MPT_LAYER}.ffn.down_proj", f"{OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.norm_f", "norm"),
    _HEAD,
)
_BLOOM_LENGTH = 2048  # where a file says null, or nothing
# What MPT's attention is served without.
_WITHOUT = ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id")


def _read(
    config: JsonObject,
    architecture: str,
    *,
    hidden_key: str,
    heads_key: str,
    layers_key: str,
    has_bias: bool = True,
    **flags: Any,
) -> ModelConfig:
    """Read what all of these have.

    Args:
        hidden_key, heads_key, layers_key: where config.json says the hidden size, and how many heads and layers.
        has_bias: norms and products have.
        flags: fields of `ModelConfig` that this family sets.
    """
    hidden_size, num_heads = positive(config, hidden_key), positive(config, heads_key)
    num_layers = positive(config, layers_key, limit=MAX_LAYERS)
    head_dim = split_evenly(hidden_key, hidden_size, num_heads)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * num_layers,
        windows=(0,) * num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        dtype=dtype(config),
        norm="layer",
        norm_bias=has_bias,
        qkv_bias=has_bias,
        output_bias=has_bias,
        is_gated=False,
        mlp_bias=has_bias,
        **{"attention_scale": head_dim**-0.5, "intermediate_size": 4 * hidden_size, **flags},
    )


def _read_gpt2(config: JsonObject, architecture: str) -> ModelConfig:
    if config.get("quantization_config"):
        raise unserved("quantization_config", config["quantization_config"], f"unset for {_GPT2}")
    if config.get("use_sliding_window"):
        raise unserved("use_sliding_window", True, f"false for {_GPT2}")
    expect(config, "scale_attn_weights", True)
    expect(config, "scale_attn_by_inverse_layer_idx", False)
    expect(config, "add_cross_attention", False)
    return _read(
        config,
        architecture,
        hidden_key="n_embd",
        heads_key="n_head",
        layers_key="n_layer",
        intermediate_size=positive(config, "n_inner", 4 * positive(config, "n_embd")),
        max_position_embeddings=positive(config, "n_positions"),
        has_position_embedding=True,
        activation=activation(config, "activation_function", "gelu_new", GELUS),
    )


def _read_bloom(config: JsonObject, architecture: str) -> ModelConfig:
    expect(config, "apply_residual_connection_post_layernorm", False)
    heads_key = first_key(config, "n_head", "num_attention_heads")
    return _read(
        config,
        architecture,
        hidden_key=first_key(config, "hidden_size", "n_embed"),
        heads_key=heads_key,
        layers_key=first_key(config, "n_layer", "num_hidden_layers"),
        max_position_embeddings=positive(config, "seq_length", _BLOOM_LENGTH),
        quantization=parse_quantization(config),
        alibi_slopes=_bloom_slopes(positive(config, heads_key)),
        embedding_norm=True,
        qkv_by_head=True,
        activation="gelu_tanh",
    )


def _bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8 / n), 2^(-16 / n) ... of the largest power of two n; other heads have every other slope of 2 n."""
    num_first = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * number / num_first) for number in range(1, num_first + 1)]
    between = [2.0 ** (-4 * number / num_first) for number in range(1, 2 * num_first, 2)]
    return tuple([*first, *between][:num_heads])


def _read_mpt(config: JsonObject, architecture: str) -> ModelConfig:
    attention = _mpt_attention(config)
    if config.get("logit_scale") is not None:
        raise unserved("logit_scale", config["logit_scale"], "null")
    choice(config, "norm_type", "low_precision_layernorm", ("low_precision_layernorm", "layernorm"))
    hidden_size, num_heads = positive(config, "d_model"), positive(config, "n_heads")
    is_clipped = attention.get("clip_qkv") not in (None, 0)
    return _read(
        config,
        architecture,
        hidden_key="d_model",
        heads_key="n_heads",
        layers_key="n_layers",
        has_bias=not flag(config, "no_bias", True),
        intermediate_size=positive(config, "expansion_ratio", 4, limit=MAX_SIZE // hidden_size) * hidden_size,
        max_position_embeddings=positive(config, "max_seq_len"),
        attention_scale=number(attention, "softmax_scale", split_evenly("d_model", hidden_size, num_heads) ** -0.5),
        quantization=parse_quantization(config),
        alibi_slopes=_mpt_slopes(num_heads, positive(attention, "alibi_bias_max", 8)),
        qkv_limit=number(attention, "clip_qkv") if is_clipped else 0.0,
        activation="gelu",
    )


def _mpt_attention(config: JsonObject) -> JsonObject:
    """What is said of attention, where that is served."""
    attention = json_object(config, "attn_config")
    choice(attention, "attn_type", "multihead_attention", ("multihead_attention",))
    expect(attention, "alibi", True)
    for key in _WITHOUT:
        expect(attention, key, False)
    if attention.get("sliding_window_size", -1) != -1:
        raise unserved("sliding_window_size", attention["sliding_window_size"], "-1")
    return attention


def _mpt_slopes(num_heads: int, bias_max: int) -> tuple[float, ...]:
    """2^(-bias_max / n), 2^(-2 bias_max / n) ... of the smallest power of two n that suffices; where it is not the
    number of heads, every other of these first, from the second on, then the others."""
    num_slopes = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * number / num_slopes) for number in range(1, num_slopes + 1)]
    return tuple(slopes if num_slopes == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])


# Old checkpoints carry the causal mask of every layer.
GPT2 = Family(
    (_GPT2,),
    _read_gpt2,
    _GPT2_WEIGHTS,
    ignored=r"\.attn\.(masked_)?bias$",
    optional_prefix="transformer.",
    length_key="n_positions",
)
BLOOM = Family(
    ("BloomForCausalLM",),
    _read_bloom,
    _BLOOM_WEIGHTS,
    optional_prefix="transformer.",
    defaults={"seq_length": _BLOOM_LENGTH},
    length_key="seq_length",
)
# The first name is that of transformers, the second that of the published files.
MPT = Family(
    ("MptForCausalLM", "MPTForCausalLM"),
    _read_mpt,
    _MPT_WEIGHTS,
    optional_prefix="transformer.",
    length_key="max_seq_len",
)
