"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825): a Llama whose layers all have a sliding window.
Ministral 3 (2025, https://arxiv.org/abs/2601.08584) lets queries grow with their position instead. Mixtral (2024,
https://arxiv.org/abs/2401.04088) has experts in all layers."""

from pagewire.common.network.config import JsonObject, ModelConfig, QueryGrowth
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYER,
    LLAMA_WEIGHTS,
    OURS,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Split,
    Weight,
    inside,
    read_decoder,
    read_experts,
)
from pagewire.common.network.families.positions import read_equal_windows, read_rope, rope_settings
from pagewire.common.network.families.reading import num_layers_of, number, positive

_MOE, _MLP = f"{LAYER}.block_sparse_moe", f"{OURS}.mlp"
_ATTENTION = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *HEAD)
_MIXTRAL_WEIGHTS = (
    *_ATTENTION,
    Weight(f"{_MOE}.gate", f"{_MLP}.router"),
    Weight(f"{_MOE}.experts.{{expert}}.w1", f"{_MLP}.up.{{expert}}", part=0, split=Split.EXPERT_INTERMEDIATE),
    Weight(f"{_MOE}.experts.{{expert}}.w3", f"{_MLP}.up.{{expert}}", part=1, split=Split.EXPERT_INTERMEDIATE),
    Weight(f"{_MOE}.experts.{{expert}}.w2", f"{_MLP}.down.{{expert}}", split=Split.EXPERT_INTERMEDIATE, axis=1),
)


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, windows=read_equal_windows(config))


def _read_text(config: JsonObject, architecture: str) -> ModelConfig:
    """Of Mistral Small 3 and Ministral 3, which tell by their types which they are."""
    return (MINISTRAL3 if config.get("model_type") == "ministral3" else MISTRAL).parse(config, architecture)


def _read_ministral3(config: JsonObject, architecture: str) -> ModelConfig:
    settings, growth = rope_settings(config), None
    if settings.get("llama_4_scaling_beta") is not None:
        original = positive(settings, "original_max_position_embeddings")
        growth = QueryGrowth(number(settings, "llama_4_scaling_beta"), original)
    return read_decoder(
        config,
        architecture,
        windows=read_equal_windows(config, default_window=None),
        default_eps=1e-5,
        query_growth=growth,
    )


def _read_mixtral(config: JsonObject, architecture: str) -> ModelConfig:
    return read_decoder(
        config,
        architecture,
        ropes=read_rope(config, default_theta=1_000_000.0),
        windows=read_equal_windows(config, default_window=None),
        default_eps=1e-5,
        experts=read_experts(config, "num_local_experts", "intermediate_size"),
        expert_layers=(True,) * num_layers_of(config),
    )


MISTRAL = Family(("MistralForCausalLM",), _read, LLAMA_WEIGHTS)
MINISTRAL3 = Family(
    ("Ministral3ForCausalLM",),
    _read_ministral3,
    LLAMA_WEIGHTS,
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
    _MIXTRAL_WEIGHTS,
    # As transformers 5 can write them.
    alternatives=((*_ATTENTION, ROUTER, *EXPERTS),),
)
MISTRAL3 = inside(Family((), _read_text, LLAMA_WEIGHTS), "Mistral3ForConditionalGeneration", ("mistral", "ministral3"))
