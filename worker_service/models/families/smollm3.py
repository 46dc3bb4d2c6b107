"""SmolLM3 (Bakouch et al., 2025, https://huggingface.co/blog/smollm3): a Llama in which one layer of four has no
positions (NoPE, https://arxiv.org/abs/2501.18795). Those layers alone may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from worker_service.models.config import ModelConfig
from worker_service.models.families.family import LLAMA_WEIGHTS, Family, num_layers_of, read_decoder
from worker_service.models.families.positions import FULL, SLIDING, read_layer_types, read_rope, sliding_window
from worker_service.models.families.reading import flag, positive, unserved

# What files may leave out.
_DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    config = {**_DEFAULTS, **config}
    num_layers = num_layers_of(config)
    has_rope = _layers_with_rope(config, num_layers)
    rope, num_positions = read_rope(config, positive(config, "max_position_embeddings"), default_theta=2_000_000.0)
    window = sliding_window(config, None) if flag(config, "use_sliding_window", False) else 0
    default_types = [SLIDING if window and not has else FULL for has in has_rope]
    layer_types = read_layer_types(config, num_layers, default_types, (FULL, SLIDING) if window else (FULL,))
    has_bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    return read_decoder(
        config,
        architecture,
        ropes=(tuple(rope if has else None for has in has_rope), num_positions),
        windows=tuple(window if layer_type == SLIDING else 0 for layer_type in layer_types),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=mlp_bias,
    )


def _layers_with_rope(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    interval = positive(config, "no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")  # 1: the layer has positions
    if given is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(has not in (0, 1) for has in given):
        raise unserved("no_rope_layers", given, f"a list of 0 and 1 as long as num_hidden_layers, {num_layers}")
    return [bool(has) for has in given]


FAMILY = Family(("SmolLM3ForCausalLM",), _read, LLAMA_WEIGHTS)
