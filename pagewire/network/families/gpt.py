"""GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), OPT, BLOOM and MPT.

GPT-2 and OPT (Zhang et al., 2022, https://arxiv.org/abs/2205.01068) have layer norms, a plain MLP, and learned
positions. BLOOM and MPT have the same structure but no position
embeddings: their scores decrease with the distance (ALiBi). BLOOM (Le Scao et al., 2022,
https://arxiv.org/abs/2211.05100) has a norm after the embedding, and stores queries, keys and values as one projection,
head by head. MPT (MosaicML, 2023, https://www.databricks.com/blog/mpt-7b) uses different ALiBi slopes, has no biases by
default, and may clip queries, keys and values.
"""

from collections.abc import Iterator
from typing import Any

from pagewire.network.blocks import activation, embed, layer, lm_head
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig
from pagewire.network.families.reading import (
    GELUS,
    MAX_LAYERS,
    MAX_SIZE,
    JsonObject,
    choice,
    dtype,
    expect,
    first_key,
    flag,
    json_object,
    number,
    positive,
    read_activation,
    split_evenly,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Embed, Operation, Table
from pagewire.network.quantization import parse_quantization
from pagewire.network.rewrites import Renaming

_GPT2 = "GPT2LMHeadModel"
_BLOOM_LENGTH = 2048  # the default if the setting is null or missing
_OPT_OFFSET = 2  # rows of the position embedding that no position uses
# Settings of MPT's attention that are not supported.
_WITHOUT = ("prefix_lm", "qk_ln", "qk_gn", "rope", "attn_uses_sequence_id")


def _read(
    config: JsonObject,
    architecture: str,
    *,
    hidden_key: str,
    heads_key: str,
    layers_key: str,
    **others: Any,
) -> TextConfig:
    """Read the settings from config.json that GPT-2, BLOOM and MPT have in common.

    `hidden_key`, `heads_key` and `layers_key` are the keys in config.json for the hidden size and for the numbers of
    heads and layers. `others` sets further fields of `TextConfig`.
    """
    hidden_size, num_heads = positive(config, hidden_key), positive(config, heads_key)
    num_layers = positive(config, layers_key, limit=MAX_LAYERS)
    return TextConfig(
        config=config,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=split_evenly(hidden_key, hidden_size, num_heads),
        vocab_size=positive(config, "vocab_size"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * num_layers,
        windows=(0,) * num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        dtype=dtype(config),
        **{"intermediate_size": 4 * hidden_size, "quantization": None, **others},
    )


def _read_gpt2(config: JsonObject, architecture: str) -> Network:
    if config.get("quantization_config"):
        raise unserved("quantization_config", config["quantization_config"], f"unset for {_GPT2}")
    if config.get("use_sliding_window"):
        raise unserved("use_sliding_window", True, f"false for {_GPT2}")
    expect(config, "scale_attn_weights", True)
    expect(config, "scale_attn_by_inverse_layer_idx", False)
    expect(config, "add_cross_attention", False)
    text = _read(
        config,
        architecture,
        hidden_key="n_embd",
        heads_key="n_head",
        layers_key="n_layer",
        intermediate_size=positive(config, "n_inner", 4 * positive(config, "n_embd")),
        num_positions=positive(config, "n_positions"),
        activation=read_activation(config, "activation_function", "gelu_new", GELUS),
    )
    return text.network(_gpt2(text))


def _gpt2(text: TextConfig) -> Iterator[Operation]:
    """Yield the operations of GPT-2. Its linear layers were implemented as 1-d convolutions, so the weights are stored
    as [in, out]."""
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=True)
    tokens = Table("transformer.wte", text.vocab_size, text.hidden_size)
    yield Embed("x", tokens, Table("transformer.wpe", text.num_positions, text.hidden_size))
    for at in range(text.num_layers):
        name = f"transformer.h.{at}"
        attend = text.attention(at, qkv_bias=True, output_bias=True)
        yield from layer(
            norm,
            (f"{name}.ln_1", f"{name}.ln_2"),
            attend(f"{name}.attn", ("c_attn",), "c_proj", is_transposed=True),
            mlp(f"{name}.mlp", ("c_fc",), "c_proj", is_transposed=True),
        )
    yield norm("transformer.ln_f")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


def _read_opt(config: JsonObject, architecture: str) -> Network:
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        expect(config, key, True)
    expect(config, "_remove_final_layer_norm", False)
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise unserved("word_embed_proj_dim", config["word_embed_proj_dim"], "hidden_size")
    text = _read(
        {**config, "layer_norm_epsilon": None},  # the file may have it, but the model does not read it
        architecture,
        hidden_key="hidden_size",
        heads_key="num_attention_heads",
        layers_key="num_hidden_layers",
        intermediate_size=positive(config, "ffn_dim"),
        num_positions=positive(config, "max_position_embeddings"),
        activation=read_activation(config, "activation_function", "relu", ("relu", *GELUS)),
        quantization=parse_quantization(config),
    )
    return text.network(_opt(text))


def _opt(text: TextConfig) -> Iterator[Operation]:
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=True)
    positions = Table("model.decoder.embed_positions", text.num_positions, text.hidden_size, _OPT_OFFSET)
    yield Embed("x", Table("model.decoder.embed_tokens", text.vocab_size, text.hidden_size), positions)
    for at in range(text.num_layers):
        name = f"model.decoder.layers.{at}"
        attention = text.attention(at, qkv_bias=True, output_bias=True)(f"{name}.self_attn", output="out_proj")
        norms = (f"{name}.self_attn_layer_norm", f"{name}.final_layer_norm")
        yield from layer(norm, norms, attention, mlp(name, ("fc1",), "fc2"))
    yield norm("model.decoder.final_layer_norm")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


def _read_bloom(config: JsonObject, architecture: str) -> Network:
    expect(config, "apply_residual_connection_post_layernorm", False)
    text = _read(
        config,
        architecture,
        hidden_key=first_key(config, "hidden_size", "n_embed"),
        heads_key=first_key(config, "n_head", "num_attention_heads"),
        layers_key=first_key(config, "n_layer", "num_hidden_layers"),
        num_positions=positive(config, "seq_length", _BLOOM_LENGTH),
        quantization=parse_quantization(config),
        activation="gelu_tanh",
    )
    return text.network(_bloom(text))


def _bloom(text: TextConfig) -> Iterator[Operation]:
    norm, slopes = text.norm(is_centered=True, has_bias=True), bloom_slopes(text.num_heads)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=True)
    yield Embed("embedded", Table("transformer.word_embeddings", text.vocab_size, text.hidden_size))
    yield norm("transformer.word_embeddings_layernorm", "embedded", "x")
    for at in range(text.num_layers):
        name = f"transformer.h.{at}"
        attend = text.attention(at, text.heads(at, slopes=slopes), qkv_bias=True, output_bias=True)
        yield from layer(
            norm,
            (f"{name}.input_layernorm", f"{name}.post_attention_layernorm"),
            attend(f"{name}.self_attention", ("query_key_value",), "dense", are_by_head=True),
            mlp(f"{name}.mlp", ("dense_h_to_4h",), "dense_4h_to_h"),
        )
    yield norm("transformer.ln_f")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each attention head for ALiBi position biases, as BLOOM defines them.

    For n heads, with n a power of two, the slopes are 2^(-8 / n), 2^(-16 / n) and so on. If `num_heads` is not a power
    of two, n is the largest power of two below it, and the remaining heads get every other slope of the series for 2 n
    heads, beginning with the first.
    """
    num_first = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * number / num_first) for number in range(1, num_first + 1)]
    between = [2.0 ** (-4 * number / num_first) for number in range(1, 2 * num_first, 2)]
    return tuple([*first, *between][:num_heads])


def _read_mpt(config: JsonObject, architecture: str) -> Network:
    attention = _mpt_attention(config)
    if config.get("logit_scale") is not None:
        raise unserved("logit_scale", config["logit_scale"], "null")
    choice(config, "norm_type", "low_precision_layernorm", ("low_precision_layernorm", "layernorm"))
    hidden_size = positive(config, "d_model")
    text = _read(
        config,
        architecture,
        hidden_key="d_model",
        heads_key="n_heads",
        layers_key="n_layers",
        intermediate_size=positive(config, "expansion_ratio", 4, limit=MAX_SIZE // hidden_size) * hidden_size,
        num_positions=positive(config, "max_seq_len"),
        quantization=parse_quantization(config),
        activation="gelu",
    )
    return text.network(_mpt(text, attention, has_bias=not flag(config, "no_bias", True)))


def _mpt(text: TextConfig, attention: JsonObject, *, has_bias: bool) -> Iterator[Operation]:
    """Yield the operations of an MPT model. `attention` is the `attn_config` of config.json. `has_bias` says whether
    norms and linear layers have biases."""
    scale = number(attention, "softmax_scale", text.head_dim**-0.5)
    slopes = _mpt_slopes(text.num_heads, positive(attention, "alibi_bias_max", 8))
    limit = number(attention, "clip_qkv") if attention.get("clip_qkv") not in (None, 0) else 0.0
    norm = text.norm(is_centered=True, has_bias=has_bias)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=has_bias)
    yield embed("transformer.wte", text.vocab_size, text.hidden_size)
    for at in range(text.num_layers):
        name, heads = f"transformer.blocks.{at}", text.heads(at, scale, slopes=slopes)
        attend = text.attention(at, heads, qkv_bias=has_bias, output_bias=has_bias, limit=limit)
        yield from layer(
            norm,
            (f"{name}.norm_1", f"{name}.norm_2"),
            attend(f"{name}.attn", ("Wqkv",), "out_proj"),
            mlp(f"{name}.ffn", ("up_proj",), "down_proj"),
        )
    yield norm("transformer.norm_f")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


def _mpt_attention(config: JsonObject) -> JsonObject:
    """Return the attention settings (`attn_config`) of an MPT model's config.json. Raises CheckpointError if a setting
    is not supported."""
    attention = json_object(config, "attn_config")
    choice(attention, "attn_type", "multihead_attention", ("multihead_attention",))
    expect(attention, "alibi", True)
    for key in _WITHOUT:
        expect(attention, key, False)
    if attention.get("sliding_window_size", -1) != -1:
        raise unserved("sliding_window_size", attention["sliding_window_size"], "-1")
    return attention


def _mpt_slopes(num_heads: int, bias_max: int) -> tuple[float, ...]:
    """Return the slope of each attention head for ALiBi position biases, as MPT defines them.

    For n heads, with n a power of two, the slopes are 2^(-bias_max / n), 2^(-2 bias_max / n) and so on. If `num_heads`
    is not a power of two, n is the smallest power of two above it. The heads then get the second, fourth, ... slope of
    this series, followed by the first, third, ... slope.
    """
    num_slopes = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * number / num_slopes) for number in range(1, num_slopes + 1)]
    return tuple(slopes if num_slopes == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])


_RENAMINGS: tuple[Renaming, ...] = ((), ((r"^transformer\.", ""),))
# Old checkpoints store the causal mask of every layer.
GPT2 = Family((_GPT2,), _read_gpt2, ignored=r"\.attn\.(masked_)?bias$", renamings=_RENAMINGS, length_key="n_positions")
OPT = Family(
    ("OPTForCausalLM",),
    _read_opt,
    renamings=((), WITHOUT_PREFIX),
    defaults={"tie_word_embeddings": True},
)
BLOOM = Family(
    ("BloomForCausalLM",),
    _read_bloom,
    renamings=_RENAMINGS,
    defaults={"seq_length": _BLOOM_LENGTH},
    length_key="seq_length",
)
# The first name is used by transformers, the second by the published files.
MPT = Family(("MptForCausalLM", "MPTForCausalLM"), _read_mpt, renamings=_RENAMINGS, length_key="max_seq_len")
