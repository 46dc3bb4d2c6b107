"""MiniMax-M2 (MiniMax, 2025, https://huggingface.co/MiniMaxAI/MiniMax-M2).

It has experts in all layers, chosen by sigmoid scores and corrections. A part of each head is rotated. One norm covers
the queries of all heads, and another covers the keys of all heads.
"""

from collections.abc import Iterator

from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, head_dim_of
from pagewire.network.families.mistral import NEW_MIXTRAL_NAMES
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import JsonObject, choice, expect, positive, unserved
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    expect(config, "use_qk_norm", True)
    expect(config, "use_routing_bias", True)
    choice(config, "scoring_func", "sigmoid", ("sigmoid",))
    choice(config, "qk_norm_type", "per_layer", ("per_layer",))
    rotary_size, head_dim = positive(config, "rotary_dim", head_dim_of(config)), head_dim_of(config)
    if rotary_size > head_dim:
        raise unserved("rotary_dim", rotary_size, f"at most head_dim, {head_dim}")
    text = TextConfig.read(
        config, architecture, ropes=read_rope(config, default_theta=5_000_000.0, default_share=rotary_size / head_dim)
    )
    experts = text.experts("num_local_experts", "intermediate_size", scoring="sigmoid", renormalizes=True)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        moe = f"{name}.block_sparse_moe"
        correction = experts.correction(f"{moe}.e_score_correction_bias")
        yield from experts(f"{moe}.gate", f"{moe}.experts.{{expert}}", ("w1", "w3"), "w2", correction=correction)

    return text.llama(mlp, qk_norm="projection")


FAMILY = Family(
    ("MiniMaxM2ForCausalLM",),
    _read,
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    renamings=tuple((*names, *prefix) for prefix in ((), WITHOUT_PREFIX) for names in ((), NEW_MIXTRAL_NAMES)),
)
