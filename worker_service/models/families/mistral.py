"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825): a Llama whose layers all have a sliding window.
Ministral 3 (2025, https://arxiv.org/abs/2601.08584) lets queries grow with their position instead."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig, QueryGrowth
from worker_service.models.families.family import LLAMA_WEIGHTS, Family, num_layers_of, read_decoder
from worker_service.models.families.positions import read_equal_windows, rope_settings
from worker_service.models.families.reading import number, positive

# What files may leave out.
_MINISTRAL3_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, windows=read_equal_windows(config, num_layers_of(config)))


def _read_ministral3(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_MINISTRAL3_DEFAULTS, **config}
    settings, growth = rope_settings(config), None
    if settings.get("llama_4_scaling_beta") is not None:
        original = positive(settings, "original_max_position_embeddings")
        growth = QueryGrowth(number(settings, "llama_4_scaling_beta"), original)
    return read_decoder(
        config,
        architecture,
        windows=read_equal_windows(config, num_layers_of(config), default_window=None),
        default_eps=1e-5,
        query_growth=growth,
    )


MISTRAL = Family(("MistralForCausalLM",), _read, LLAMA_WEIGHTS)
MINISTRAL3 = Family(("Ministral3ForCausalLM",), _read_ministral3, LLAMA_WEIGHTS)
