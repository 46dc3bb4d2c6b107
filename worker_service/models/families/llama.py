"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) with grouped-query attention (Ainslie et al., 2023,
https://arxiv.org/abs/2305.13245)."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import LLAMA_WEIGHTS, Family, read_decoder
from worker_service.models.families.reading import flag


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    has_bias = flag(config, "attention_bias", False)
    mlp_bias = flag(config, "mlp_bias", False)
    return read_decoder(config, architecture, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias)


FAMILY = Family(("LlamaForCausalLM",), _read, LLAMA_WEIGHTS)
