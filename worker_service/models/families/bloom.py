"""BLOOM (Le Scao et al., 2022, https://arxiv.org/abs/2211.05100).

No positions, but scores that fall by the distance (ALiBi); a norm behind the embedding; queries, keys and values are
one product, head by head.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import MAX_LAYERS, ModelConfig
from worker_service.models.families.family import Family, Weight
from worker_service.models.families.reading import dtype, expect, first_key, flag, number, positive, split_evenly
from worker_service.models.quantization import parse_quantization
from worker_service.models.shard import Split

_LAYER, _OURS = "transformer.h.{layer}", "layers.{layer}"
_WEIGHTS = (
    Weight("transformer.word_embeddings", "embedding"),
    Weight("transformer.word_embeddings_layernorm", "embedding_norm"),
    Weight(f"{_LAYER}.input_layernorm", f"{_OURS}.attention_norm"),
    Weight(f"{_LAYER}.self_attention.query_key_value", f"{_OURS}.attention.qkv", split=(Split.QKV_BY_HEAD,)),
    Weight(f"{_LAYER}.self_attention.dense", f"{_OURS}.attention.output", split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.post_attention_layernorm", f"{_OURS}.mlp_norm"),
    Weight(f"{_LAYER}.mlp.dense_h_to_4h", f"{_OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.mlp.dense_4h_to_h", f"{_OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("transformer.ln_f", "norm"),
    Weight("lm_head", "head", split=Split.VOCABULARY),
)


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    expect(config, "apply_residual_connection_post_layernorm", False)
    hidden_key = first_key(config, "hidden_size", "n_embed")
    hidden_size = positive(config, hidden_key)
    num_heads = positive(config, first_key(config, "n_head", "num_attention_heads"))
    num_layers = positive(config, first_key(config, "n_layer", "num_hidden_layers"), limit=MAX_LAYERS)
    head_dim = split_evenly(hidden_key, hidden_size, num_heads)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        max_position_embeddings=positive(config, "seq_length", 2048),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        ropes=(None,) * num_layers,
        windows=(0,) * num_layers,
        tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        dtype=dtype(config),
        attention_scale=head_dim**-0.5,
        quantization=parse_quantization(config),
        alibi_slopes=_slopes(num_heads),
        norm="layer",
        norm_bias=True,
        embedding_norm=True,
        qkv_by_head=True,
        qkv_bias=True,
        output_bias=True,
        is_gated=False,
        activation="gelu_tanh",
        mlp_bias=True,
    )


def _slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8 / n), 2^(-16 / n) ... of the largest power of two n; other heads have every other slope of 2 n."""
    num_first = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * number / num_first) for number in range(1, num_first + 1)]
    between = [2.0 ** (-4 * number / num_first) for number in range(1, 2 * num_first, 2)]
    return tuple([*first, *between][:num_heads])


FAMILY = Family(("BloomForCausalLM",), _read, _WEIGHTS, optional_prefix="transformer.")
