"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825): a Llama with a sliding window in all layers by
default.

Ministral 3 (2025, https://arxiv.org/abs/2601.08584) has no window by default; its queries grow with their position.
Mixtral (2024, https://arxiv.org/abs/2401.04088) has experts in all layers.
"""

from collections.abc import Iterator

from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, inside
from pagewire.network.families.positions import read_equal_windows, read_rope, rope_settings
from pagewire.network.families.reading import JsonObject, number, positive
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


# Mixtral's names as transformers 5 can write them.
NEW_MIXTRAL_NAMES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1$", ".gate_proj"),
    (r"\.w3$", ".up_proj"),
    (r"\.w2$", ".down_proj"),
)
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
MISTRAL3 = inside(Family((), _read_text), "Mistral3ForConditionalGeneration", ("mistral", "ministral3"))
