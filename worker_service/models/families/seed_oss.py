"""Seed-OSS (ByteDance Seed, 2025, https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base): a Llama whose biases of
queries, keys and values and of attention's output are chosen apart."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import LLAMA_WEIGHTS, Family, read_decoder
from worker_service.models.families.reading import flag

# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    return read_decoder(
        {**_DEFAULTS, **config},
        architecture,
        qkv_bias=flag(config, "attention_bias", True),
        output_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )


FAMILY = Family(("SeedOssForCausalLM",), _read, LLAMA_WEIGHTS)
