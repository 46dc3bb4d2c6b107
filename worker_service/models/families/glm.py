"""GLM-4 (Zeng et al., 2024, https://arxiv.org/abs/2406.12793).

As "glm" it has norms before attention and MLP, as "glm4" behind them too. A half of each head is turned, in pairs of
neighbours.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    HEAD,
    MERGED_MLP,
    MLP_OUTPUT,
    PRE_NORMS,
    QKV,
    Family,
    Weight,
    num_layers_of,
    read_decoder,
)
from worker_service.models.families.positions import read_rope
from worker_service.models.families.reading import flag, positive

_LAYER, _OURS = "model.layers.{layer}", "layers.{layer}"
_WEIGHTS = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *MERGED_MLP, MLP_OUTPUT, *HEAD)
_POST_NORMS = (
    Weight(f"{_LAYER}.post_self_attn_layernorm", f"{_OURS}.attention_post_norm"),
    Weight(f"{_LAYER}.post_mlp_layernorm", f"{_OURS}.mlp_post_norm"),
)

# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    num_layers = num_layers_of(config)
    rope, num_positions = read_rope(
        config, positive(config, "max_position_embeddings"), default_share=0.5, is_interleaved=True
    )
    return read_decoder(
        config,
        architecture,
        ropes=((rope,) * num_layers, num_positions),
        default_eps=1.5625e-7,
        qkv_bias=flag(config, "attention_bias", True),
        post_norm=architecture == "Glm4ForCausalLM",
    )


GLM = Family(("GlmForCausalLM",), _read, _WEIGHTS)
GLM4 = Family(("Glm4ForCausalLM",), _read, (*_WEIGHTS, *_POST_NORMS))
