"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825): a Llama with a sliding window in all layers by
default.

Ministral 3 (2025, https://arxiv.org/abs/2601.08584) has no window by default; its queries grow with their position.
Mixtral (2024, https://arxiv.org/abs/2401.04088) has experts in all layers. Phi-3.5-MoE (Abdin et al., 2024,
https://arxiv.org/abs/2404.14219) is a Mixtral with layer norms, LongRoPE and two experts per token. Its router is
SparseMixer (GRIN, Liu et al., 2024, https://arxiv.org/abs/2409.12136). In training, it samples experts. In inference,
it chooses the best two, and each gets its softmax weight among the experts whose logits are close (see
`ExpertRouting.scoring`): `sparsemixer` in modeling_phimoe.py of transformers, with `training=False`. The two weights
need not add up to 1.
"""

from collections.abc import Iterator
from typing import Any

from pagewire.network.blocks import layer
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, head_dim_of, inside, norms_of
from pagewire.network.families.positions import read_equal_windows, read_rope, read_rope_of_phi, rope_settings
from pagewire.network.families.reading import JsonObject, attention_biases, expect, flag, number, positive, unserved
from pagewire.network.network import Network
from pagewire.network.operations import Operation
from pagewire.network.rope import QueryScaling


def _read(config: JsonObject, architecture: str) -> Network:
    return TextConfig.read(config, architecture, windows=read_equal_windows(config)).llama()


def _read_text(config: JsonObject, architecture: str) -> Network:
    """Read the language model of a Mistral Small 3 or Ministral 3 checkpoint. The setting model_type tells the two
    apart."""
    return (MINISTRAL3 if config.get("model_type") == "ministral3" else MISTRAL).parse(config, architecture)


def _read_ministral3(config: JsonObject, architecture: str) -> Network:
    settings, growth = rope_settings(config), None
    if settings.get("llama_4_scaling_beta") is not None:
        original = positive(settings, "original_max_position_embeddings")
        growth = QueryScaling(number(settings, "llama_4_scaling_beta"), original)
    windows = read_equal_windows(config, default_window=None)
    return TextConfig.read(config, architecture, windows=windows, default_eps=1e-5).llama(growth=growth)


def _read_mixtral(config: JsonObject, architecture: str) -> Network:
    ropes, windows = read_rope(config, default_theta=1_000_000.0), read_equal_windows(config, default_window=None)
    text = TextConfig.read(config, architecture, ropes=ropes, windows=windows, default_eps=1e-5)
    experts = text.experts("num_local_experts", "intermediate_size")

    def mlp(at: int, name: str) -> Iterator[Operation]:
        moe = f"{name}.block_sparse_moe"
        yield from experts(f"{moe}.gate", f"{moe}.experts.{{expert}}", up=("w1", "w3"), down="w2")

    return text.llama(mlp)


def _read_phimoe(config: JsonObject, architecture: str) -> Network:
    if config.get("num_experts_per_tok", 2) != 2:
        raise unserved("num_experts_per_tok", config["num_experts_per_tok"], f"2 for {architecture}")
    if has_head_bias := flag(config, "lm_head_bias", False):
        expect(config, "tie_word_embeddings", False)
    ropes = read_rope_of_phi(config, head_dim_of(config), 1_000_000.0, scale_keys=("short_mscale", "long_mscale"))
    windows = read_equal_windows(config, default_window=None)
    text = TextConfig.read(config, architecture, ropes=ropes, windows=windows, default_eps=1e-5)
    norm, biases = text.norm(is_centered=True, has_bias=True), attention_biases(config)
    jitter = number(config, "router_jitter_noise", 0.01)
    routing: dict[str, Any] = {"scoring": "sparse_mixer", "renormalizes": False, "jitter": jitter}
    experts = text.experts("num_local_experts", "intermediate_size", **routing)

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention, moe = text.attention(at, **biases)(f"{name}.self_attn"), f"{name}.block_sparse_moe"
        mlp = experts(f"{moe}.gate", f"{moe}.experts.{{expert}}", up=("w1", "w3"), down="w2")
        yield from layer(norm, norms_of(name), attention, mlp)

    return text.model(norm, layers, head_bias=has_head_bias)


# Mixtral's names as transformers 5 can write them.
NEW_MIXTRAL_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1$", ".gate_proj"),
    (r"\.w3$", ".up_proj"),
    (r"\.w2$", ".down_proj"),
)
NEW_PHIMOE_NAMES = ((r"\.gate$", ".router"), *NEW_MIXTRAL_NAMES)
MISTRAL = Family(("MistralForCausalLM",), _read)
MINISTRAL3 = Family(
    ("Ministral3ForCausalLM",),
    _read_ministral3,
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
MIXTRAL = Family(
    ("MixtralForCausalLM",),
    _read_mixtral,
    renamings=((), NEW_MIXTRAL_NAMES, WITHOUT_PREFIX, (*NEW_MIXTRAL_NAMES, *WITHOUT_PREFIX)),
)
# The first name is used by transformers, the second by the published files.
PHIMOE = Family(
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    _read_phimoe,
    renamings=tuple((*names, *prefix) for prefix in ((), WITHOUT_PREFIX) for names in ((), NEW_PHIMOE_NAMES)),
    defaults={"num_experts_per_tok": 2, "num_local_experts": 16, "num_key_value_heads": 8},
)
MISTRAL3 = inside(Family((), _read_text), "Mistral3ForConditionalGeneration", ("mistral", "ministral3"))
