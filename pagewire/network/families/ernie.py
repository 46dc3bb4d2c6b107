"""ERNIE 4.5 (Baidu, 2025, https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): a Llama that rotates
heads in pairs of neighbours.

In its variant with experts, some layers have routed experts, which are chosen by softmax scores and corrections, and
shared experts. Its modules for multi-token prediction are ignored.
"""

from collections.abc import Iterator

from pagewire.network.blocks import shared_expert
from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import (
    JsonObject,
    expect,
    flag,
    non_negative,
    num_layers_of,
    number,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation

_MAX_NORM_MIN = 1e-9  # far below the sum of the chosen experts' scores


def _read(config: JsonObject, architecture: str) -> Network:
    has_bias = flag(config, "use_bias", False)
    return _text(config, architecture).llama(qkv_bias=has_bias, output_bias=has_bias, has_mlp_bias=has_bias)


def _text(config: JsonObject, architecture: str) -> TextConfig:
    ropes = read_rope(config, default_theta=500_000.0, is_interleaved=True)
    return TextConfig.read(config, architecture, ropes=ropes, default_eps=1e-5)


def _read_moe(config: JsonObject, architecture: str) -> Network:
    expect(config, "use_bias", False)
    if number(config, "moe_norm_min", 1e-12) > _MAX_NORM_MIN:
        raise unserved("moe_norm_min", config["moe_norm_min"], f"at most {_MAX_NORM_MIN:g}")
    text, has_experts = _text(config, architecture), _read_expert_layers(config)
    experts, num_shared = text.experts("moe_num_experts"), non_negative(config, "moe_num_shared_experts", 2)
    dense, shared = text.mlp(), text.mlp(num_shared * experts.mlp.size)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if not has_experts[at]:
            yield from dense(f"{name}.mlp")
            return
        correction = experts.correction(f"{name}.mlp.moe_statics.e_score_correction_bias", is_row=True)
        yield from experts(f"{name}.mlp.gate", f"{name}.mlp.experts.{{expert}}", correction=correction)
        if num_shared:
            yield from shared_expert(shared, f"{name}.mlp.shared_experts")

    return text.llama(mlp)


def _read_expert_layers(config: JsonObject) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts instead of a dense MLP."""
    last, step = num_layers_of(config) - 1, positive(config, "moe_layer_interval", 1)
    first = non_negative(config, "moe_layer_start_index", 1)
    if config.get("moe_layer_end_index", -1) != -1:  # -1: the last layer
        last = min(last, non_negative(config, "moe_layer_end_index", last))
    return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(num_layers_of(config)))


_DEFAULTS = {"tie_word_embeddings": True}
FAMILY = Family(("Ernie4_5ForCausalLM",), _read, defaults={"num_key_value_heads": 2, "head_dim": 128, **_DEFAULTS})
# Published files have the first names, and files that transformers 5 writes may have the second.
MOE = Family(
    ("Ernie4_5_MoeForCausalLM",),
    _read_moe,
    defaults={"num_key_value_heads": 4, **_DEFAULTS},
    renamings=((), ((r"\.moe_statics\.", ".gate.moe_statics."),)),
)
