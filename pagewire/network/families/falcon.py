"""Falcon (Almazrouei et al., 2023, https://arxiv.org/abs/2311.16867), Falcon 2 11B (2024,
https://arxiv.org/abs/2407.14885) and Falcon-RW (Penedo et al., 2023, https://arxiv.org/abs/2306.01116).

Attention and the MLP run in parallel on the layer's normalized input. Queries, keys and values are one projection. In
Falcon 7B, all heads share one head of keys and values. The newer decoder of the larger models stores the projection by
KV head. Falcon 40B and 180B have a norm for attention and another for the MLP.

Falcon-RW runs attention and the MLP one after the other, and has no positions: its scores decrease with the distance,
by BLOOM's ALiBi slopes. The slopes are scaled as the scores are. transformers rounds them, and their products with
positions, to bfloat16; here, as in vLLM, they are exact.
"""

from collections.abc import Iterator

from pagewire.network.blocks import activation, embed, layer, lm_head, parallel_layer
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.gpt import bloom_slopes
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import GELUS, JsonObject, expect, flag, positive
from pagewire.network.network import Network
from pagewire.network.operations import AttentionHeads, Operation


def _read(config: JsonObject, architecture: str) -> Network:
    num_heads, is_new = positive(config, "num_attention_heads"), flag(config, "new_decoder_architecture", False)
    is_shared = flag(config, "multi_query", True) and not is_new
    if is_new:
        expect(config, "parallel_attn", True)
    num_own = positive(config, "num_kv_heads", num_heads) if is_new else num_heads
    own = {
        "num_key_value_heads": 1 if is_shared else num_own,
        "intermediate_size": positive(config, "ffn_hidden_size", 4 * positive(config, "hidden_size")),
        "head_dim": None,
    }
    ropes, num_positions = read_rope(config)
    text = TextConfig.read(
        {**config, **own},
        architecture,
        ropes=((None,) * len(ropes) if flag(config, "alibi", False) else ropes, num_positions),
        eps_key="layer_norm_epsilon",
        default_eps=1e-5,
        activation_key="activation",
        activations=GELUS,
    )
    num_norms = positive(config, "num_ln_in_parallel_attn", 1 + is_new, limit=1 + is_new)
    return text.network(_operations(text, are_by_head=not is_shared, has_mlp_norm=num_norms == 2))


def _operations(text: TextConfig, *, are_by_head: bool, has_mlp_norm: bool) -> Iterator[Operation]:
    has_bias, is_parallel = flag(text.config, "bias", False), flag(text.config, "parallel_attn", True)
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=has_bias)
    yield embed("transformer.word_embeddings", text.vocab_size, text.hidden_size)
    for at in range(text.num_layers):
        name = f"transformer.h.{at}"
        attend = text.attention(at, _heads(text, at), qkv_bias=has_bias, output_bias=has_bias)
        attention = attend(f"{name}.self_attention", ("query_key_value",), "dense", are_by_head=are_by_head)
        target = "mlp_update" if is_parallel else "update"
        multiply = mlp(f"{name}.mlp", ("dense_h_to_4h",), "dense_4h_to_h", target=target)
        if has_mlp_norm:
            yield from parallel_layer(norm, f"{name}.ln_attn", attention, multiply, f"{name}.ln_mlp")
        elif is_parallel:
            yield from parallel_layer(norm, norms_of(name)[0], attention, multiply)
        else:
            yield from layer(norm, norms_of(name), attention, multiply)
    yield norm("transformer.ln_f")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


def _heads(text: TextConfig, at: int) -> AttentionHeads:
    if text.ropes[at] is not None:
        return text.heads(at)
    return text.heads(at, slopes=tuple(slope * text.head_dim**-0.5 for slope in bloom_slopes(text.num_heads)))


# The first name is used by transformers, the second by the published files.
FAMILY = Family(
    ("FalconForCausalLM", "RWForCausalLM"),
    _read,
    renamings=((), ((r"^transformer\.", ""),)),
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
)
