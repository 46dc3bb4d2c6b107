"""Granite 3, dense (https://arxiv.org/abs/2405.04324 describes their forebears): a Llama with four factors, which
are those of maximal update parametrization (https://arxiv.org/abs/2203.03466)."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import LLAMA_WEIGHTS, Family, read_decoder
from worker_service.models.families.reading import flag, number


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    has_bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    return read_decoder(
        config,
        architecture,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=mlp_bias,
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_multiplier=1 / number(config, "logits_scaling", 1.0),
    )


FAMILY = Family(("GraniteForCausalLM",), _read, LLAMA_WEIGHTS)
