"""StarCoder2 (Lozhkov et al., 2024, https://arxiv.org/abs/2402.19173).

Rotary positions, layer norms, a plain MLP, biases everywhere, and a sliding window in all layers.
"""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    HEAD,
    PRE_NORMS,
    QKV,
    Family,
    Weight,
    num_layers_of,
    read_decoder,
)
from worker_service.models.families.positions import read_equal_windows
from worker_service.models.families.reading import flag
from worker_service.models.shard import Split

_MLP = (
    Weight("model.layers.{layer}.mlp.c_fc", "layers.{layer}.mlp.up", split=Split.INTERMEDIATE),
    Weight("model.layers.{layer}.mlp.c_proj", "layers.{layer}.mlp.down", split=Split.INTERMEDIATE, axis=1),
)

# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 2, "tie_word_embeddings": True}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    has_bias = flag(config, "use_bias", True)
    return read_decoder(
        config,
        architecture,
        windows=read_equal_windows(config, num_layers_of(config), default_window=None),
        eps_key="norm_epsilon",
        default_eps=1e-5,
        activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
        norm="layer",
        norm_bias=True,
        is_gated=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


FAMILY = Family(("Starcoder2ForCausalLM",), _read, (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *_MLP, *HEAD))
