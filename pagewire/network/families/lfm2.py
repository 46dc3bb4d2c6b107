"""LFM2 (Liquid AI, 2025, https://arxiv.org/abs/2511.23404).

Most layers have a gated short convolution instead of attention. The attention layers normalize each head of queries and
keys. In the variant with experts, all layers but the first ones have routed experts, which are chosen by sigmoid scores
and corrections.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from pagewire.common.gguf import is_whole
from pagewire.network.blocks import layer
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig
from pagewire.network.families.positions import FULL, read_layer_types, read_rope
from pagewire.network.families.reading import (
    MAX_SIZE,
    JsonObject,
    flag,
    non_negative,
    num_layers_of,
    number,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation
from pagewire.network.state_blocks import short_convolution

_CONVOLUTION = "conv"
_MLP_NAMES = ("w1", "w3"), "w2"


def _read_lfm2(config: JsonObject, architecture: str) -> Network:
    if config.get("block_ff_dim") is not None:
        config = {**config, "intermediate_size": config["block_ff_dim"]}
    text = _read_text(config, architecture)
    mlp = text.mlp(_mlp_size(config, text.intermediate_size))
    return _model(text, lambda at, name: mlp(f"{name}.feed_forward", *_MLP_NAMES))


def _read_lfm2_moe(config: JsonObject, architecture: str) -> Network:
    text = _read_text(config, architecture)
    num_dense, dense = non_negative(config, "num_dense_layers", 2), text.mlp()
    # transformers also adds 1e-6 to the sum that divides the weights.
    renormalizes, factor = flag(config, "norm_topk_prob", True), number(config, "routed_scaling_factor", 1.0)
    experts = text.experts(scoring="sigmoid", renormalizes=renormalizes, factor=factor)
    has_correction = flag(config, "use_expert_bias", True)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        moe = f"{name}.feed_forward"
        if at < num_dense:
            yield from dense(moe, *_MLP_NAMES)
        else:
            correction = experts.correction(f"{moe}.expert_bias") if has_correction else None
            yield from experts(f"{moe}.gate", f"{moe}.experts.{{expert}}", *_MLP_NAMES, correction=correction)

    return _model(text, mlp)


def _read_text(config: JsonObject, architecture: str) -> TextConfig:
    ties = config.get("tie_embedding")
    ties = flag(config, "tie_word_embeddings", True) if ties is None else ties
    config = {**config, "tie_word_embeddings": ties}
    ropes = read_rope(config, default_theta=1_000_000.0)
    return TextConfig.read(config, architecture, ropes=ropes, eps_key="norm_eps", default_eps=1e-5)


def _mlp_size(config: JsonObject, size: int) -> int:
    """Return the size of the MLP. If block_auto_adjust_ff_dim is set, it is two thirds of intermediate_size, times
    block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of."""
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return size
    multiple = positive(config, "block_multiple_of", 256)
    adjusted = int(number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    adjusted = -(-adjusted // multiple) * multiple
    if not 1 <= adjusted <= MAX_SIZE:
        expected = f"a number for which block_ffn_dim_multiplier and block_multiple_of give 1 to {MAX_SIZE} columns"
        raise unserved("intermediate_size", size, expected)
    return adjusted


def _model(text: TextConfig, mlp: Callable[[int, str], Iterator[Operation]]) -> Network:
    """Return a model of attention layers and convolution layers. `mlp` yields the MLP operations of a layer, given its
    number and name."""
    config, norm = text.config, text.norm()
    kinds = _layer_types(config)
    has_bias, kernel_size = flag(config, "conv_bias", False), positive(config, "conv_L_cache", 3, least=2)

    def layers(at: int, name: str) -> Iterator[Operation]:
        if kinds[at] == _CONVOLUTION:
            mixer = short_convolution(f"{name}.conv", text.hidden_size, kernel_size, has_bias=has_bias)
        else:
            attention = replace(text.attention(at, qk_norm="head"), layer=kinds[:at].count(FULL))
            mixer = attention(f"{name}.self_attn", output="out_proj")
        yield from layer(norm, (f"{name}.operator_norm", f"{name}.ffn_norm"), mixer, mlp(at, name))

    return text.model(norm, layers)


def _layer_types(config: JsonObject) -> list[str]:
    """Return the type of each layer. Files without layer_types list the attention layers in full_attn_idxs."""
    num_layers = num_layers_of(config)
    attending = config.get("full_attn_idxs")
    attending = list(range(num_layers)) if attending is None else attending
    if not isinstance(attending, list) or not all(is_whole(layer) for layer in attending):
        raise unserved("full_attn_idxs", attending, "a list of layer numbers")
    default = [FULL if layer in attending else _CONVOLUTION for layer in range(num_layers)]
    return read_layer_types(config, default, (_CONVOLUTION, FULL), FULL)


_NAMES = ((r"\.([qk])_norm\.", r".\1_layernorm."), (r"^model\.norm\.", "model.embedding_norm."))
LFM2 = Family(
    ("Lfm2ForCausalLM",),
    _read_lfm2,
    defaults={"num_key_value_heads": 8},
    renamings=(_NAMES, (*_NAMES, *WITHOUT_PREFIX)),
)
# As transformers 5 names the parts of an expert.
_NEW_NAMES = (
    (r"(\.experts\..+)\.w1$", r"\1.gate_proj"),
    (r"(\.experts\..+)\.w3$", r"\1.up_proj"),
    (r"(\.experts\..+)\.w2$", r"\1.down_proj"),
)
LFM2_MOE = replace(
    LFM2,
    architectures=("Lfm2MoeForCausalLM",),
    read=_read_lfm2_moe,
    defaults={"num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4},
    renamings=tuple((*names, *prefix) for prefix in ((), WITHOUT_PREFIX) for names in (_NAMES, (*_NAMES, *_NEW_NAMES))),
)
