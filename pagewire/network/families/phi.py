"""Phi-3 (Abdin et al., 2024, https://arxiv.org/abs/2404.14219) and Phi-4.

They store queries, keys and values as one projection, and gates and ups as another. Phi-4-mini rotates a part of each
head. Positions may be extended by LongRoPE.

Phi-3-small has layer norms, biases, a clamped GEGLU, and the factors of maximal update parametrization
(https://arxiv.org/abs/2203.03466). By default, every other layer has block-sparse attention. transformers has no such
model. The names and the computation are those of modeling_phi3_small.py in the published repositories.
"""

from collections.abc import Iterator
from dataclasses import replace

from pagewire.common.gguf import is_whole
from pagewire.network.blocks import activation, embed, layer, lm_head
from pagewire.network.families.family import Family, TextConfig, head_dim_of, norms_of
from pagewire.network.families.positions import ORIGINAL, read_equal_windows, read_rope_of_phi
from pagewire.network.families.reading import (
    JsonObject,
    flag,
    json_object,
    non_negative,
    number,
    number_or_none,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import BlockPattern, Operation

_PATTERN_UNIT = 64  # positions; the kernels support blocks of a pattern that are a multiple
_NO_LIMIT = 1e30
# The tokens that Phi-3-small's vocabulary (cl100k_base, padded to 100352 tokens) does not use.
_UNUSED_TOKENS = (100_256, *range(100_258, 100_261), 100_264, 100_265, *range(100_267, 100_352))


def _read_phi3(config: JsonObject, architecture: str) -> Network:
    ropes = read_rope_of_phi(config, head_dim_of(config), default_share=1.0)
    windows = read_equal_windows(config, default_window=None)
    text = TextConfig.read(config, architecture, ropes=ropes, windows=windows, default_eps=1e-5)
    norm, mlp = text.norm(), text.mlp()

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at)(f"{name}.self_attn", qkv=("qkv_proj",))
        yield from layer(norm, norms_of(name), attention, mlp(f"{name}.mlp", up=("gate_up_proj",)))

    return text.model(norm, layers)


def _read_phi3_small(config: JsonObject, architecture: str) -> Network:
    if config.get("rope_position_scale", 1.0) != 1:
        raise unserved("rope_position_scale", config["rope_position_scale"], "1")
    # transformers 5 writes rope_scaling as rope_parameters, with a base that the model does not use.
    scaling = dict(json_object(config, "rope_scaling") or json_object(config, "rope_parameters"))
    rope = {**scaling, "rope_theta": number(config, "rope_embedding_base", 1e6)}
    own = {"head_dim": None, "rope_parameters": rope, "rope_scaling": None, "rope_theta": None}
    original = config.get(ORIGINAL, scaling.get(ORIGINAL))
    plain = {**config, **own, ORIGINAL: original, "intermediate_size": _intermediate_size(config)}
    ropes = read_rope_of_phi(plain, head_dim_of(plain), scale_keys=("short_mscale", "long_mscale"))
    text = TextConfig.read(
        plain, architecture, ropes=ropes, eps_key="layer_norm_epsilon", default_eps=1e-5, activations=("gegelu",)
    )
    return text.network(_phi3_small(text), unused_tokens=_unused_tokens(config, text.vocab_size))


def _intermediate_size(config: JsonObject) -> int:
    if config.get("ff_dim_multiplier") is None:
        return positive(config, "ff_intermediate_size", 14_336)
    if config.get("ff_intermediate_size") is not None:
        raise unserved("ff_dim_multiplier", config["ff_dim_multiplier"], "null if ff_intermediate_size is set")
    size = positive(config, "ff_dim_multiplier") * (positive(config, "hidden_size") // 3) * 2
    return -(-size // 256) * 256 if flag(config, "gegelu_pad_to_256", True) else size


def _unused_tokens(config: JsonObject, vocab_size: int) -> tuple[int, ...]:
    tokens = config.get("dummy_token_indices")
    if tokens is None:
        return tuple(token for token in _UNUSED_TOKENS if token < vocab_size)
    if not isinstance(tokens, list) or not all(is_whole(token) and 0 <= token < vocab_size for token in tokens):
        raise unserved("dummy_token_indices", tokens, f"a list of tokens from 0 to {vocab_size - 1}")
    return tuple(tokens)


def _phi3_small(text: TextConfig) -> Iterator[Operation]:
    config, norm = text.config, text.norm(is_centered=True, has_bias=True)
    gegelu = activation("clamped_swiglu", alpha=1.702, limit=number_or_none(config, "gegelu_limit", 20.0) or _NO_LIMIT)
    mlp = text.mlp(activation=gegelu, has_bias=True, is_interleaved=True)
    scale = None
    if flag(config, "mup_use_scaling", True):
        scale = number(config, "mup_attn_multiplier", 1.0) / text.head_dim
    factor = number_or_none(config, "mup_embedding_multiplier", 10.0) or 1.0
    yield embed("model.embed_tokens", text.vocab_size, text.hidden_size, factor)
    for at in range(text.num_layers):
        name, heads = f"model.layers.{at}", replace(text.heads(at, scale), pattern=_pattern(text, at))
        attend = text.attention(at, heads, qkv_bias=True, output_bias=True)
        attention = attend(f"{name}.self_attn", ("query_key_value",), "dense", are_by_head=True)
        yield from layer(norm, norms_of(name), attention, mlp(f"{name}.mlp", ("up_proj",)))
    yield norm("model.final_layernorm")
    divisor = number_or_none(config, "mup_width_multiplier", 8.0) or 1.0
    yield lm_head("lm_head", text.hidden_size, text.vocab_size, 1 / divisor)


def _pattern(text: TextConfig, at: int) -> BlockPattern | None:
    """Return the block pattern of a layer, or None if the layer attends to all positions."""
    config, interval = text.config, text.config.get("dense_attention_every_n_layers", 2)
    if interval is not None and non_negative(config, "dense_attention_every_n_layers", 2) and (at + 1) % interval == 0:
        return None
    block_size = positive(config, "blocksparse_block_size", _PATTERN_UNIT)
    if block_size % _PATTERN_UNIT:
        raise unserved("blocksparse_block_size", block_size, f"a multiple of {_PATTERN_UNIT}")
    num_local = positive(config, "blocksparse_num_local_blocks", 16)
    stride = positive(config, "blocksparse_vert_stride", 8)
    head_step = 0 if flag(config, "blocksparse_homo_head_pattern", False) else max(1, stride // text.num_heads)
    return BlockPattern(block_size, num_local, stride, 1, head_step)


PHI3 = Family(("Phi3ForCausalLM",), _read_phi3)
PHI3_SMALL = Family(
    ("Phi3SmallForCausalLM",), _read_phi3_small, defaults={"num_key_value_heads": 8, "tie_word_embeddings": True}
)
