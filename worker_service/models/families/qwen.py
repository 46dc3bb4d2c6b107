"""Qwen2 (https://arxiv.org/abs/2407.10671): biases of queries, keys and values. Qwen3 (https://arxiv.org/abs/2505.09388)
normalizes each head of queries and keys instead. In both some layers may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import HEAD_NORMS, LLAMA_WEIGHTS, Family, num_layers_of, read_decoder
from worker_service.models.families.positions import read_chosen_windows
from worker_service.models.families.reading import flag


def _read_qwen2(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, windows=read_chosen_windows(config, num_layers_of(config)), qkv_bias=True)


def _read_qwen3(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    has_bias = flag(config, "attention_bias", False)
    windows = read_chosen_windows(config, num_layers_of(config))
    return read_decoder(config, architecture, windows=windows, qkv_bias=has_bias, output_bias=has_bias, qk_norm="head")


QWEN2 = Family(("Qwen2ForCausalLM",), _read_qwen2, LLAMA_WEIGHTS)
QWEN3 = Family(("Qwen3ForCausalLM",), _read_qwen3, (*LLAMA_WEIGHTS, *HEAD_NORMS))
