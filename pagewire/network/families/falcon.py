"""Falcon (Almazrouei et al., 2023, https://arxiv.org/abs/2311.16867): the models of 7 billion parameters and less.

By default, attention and the MLP run in parallel on the layer's normalized input, and all heads share one head of keys
and values. Queries, keys and values are one projection.
"""

from collections.abc import Iterator

from pagewire.network.blocks import activation, embed, layer, lm_head, parallel_layer
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.reading import GELUS, JsonObject, expect, flag, positive
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    expect(config, "alibi", False)
    expect(config, "new_decoder_architecture", False)
    is_shared, num_heads = flag(config, "multi_query", True), positive(config, "num_attention_heads")
    own = {
        "num_key_value_heads": 1 if is_shared else num_heads,
        "intermediate_size": positive(config, "ffn_hidden_size", 4 * positive(config, "hidden_size")),
        "head_dim": None,
    }
    text = TextConfig.read(
        {**config, **own},
        architecture,
        eps_key="layer_norm_epsilon",
        default_eps=1e-5,
        activation_key="activation",
        activations=GELUS,
    )
    return text.network(_operations(text, are_by_head=not is_shared))


def _operations(text: TextConfig, *, are_by_head: bool) -> Iterator[Operation]:
    has_bias, is_parallel = flag(text.config, "bias", False), flag(text.config, "parallel_attn", True)
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=has_bias)
    yield embed("transformer.word_embeddings", text.vocab_size, text.hidden_size)
    for at in range(text.num_layers):
        name = f"transformer.h.{at}"
        attend = text.attention(at, qkv_bias=has_bias, output_bias=has_bias)
        attention = attend(f"{name}.self_attention", ("query_key_value",), "dense", are_by_head=are_by_head)
        target = "mlp_update" if is_parallel else "update"
        multiply = mlp(f"{name}.mlp", ("dense_h_to_4h",), "dense_4h_to_h", target=target)
        if is_parallel:
            yield from parallel_layer(norm, norms_of(name)[0], attention, multiply)
        else:
            yield from layer(norm, norms_of(name), attention, multiply)
    yield norm("transformer.ln_f")
    yield lm_head("lm_head", text.hidden_size, text.vocab_size)


# The first name is used by transformers, the second by the published files.
FAMILY = Family(
    ("FalconForCausalLM", "RWForCausalLM"),
    _read,
    renamings=((), ((r"^transformer\.", ""),)),
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
)
