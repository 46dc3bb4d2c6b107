"""Phi-3 (Abdin et al., 2024, https://arxiv.org/abs/2404.14219) and Phi-4.

A Llama whose queries, keys and values are one product, gates and ups another. Phi-4-mini turns a part of each head, and
both stretch positions by LongRoPE.
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
    Family,
    Weight,
    head_dim_of,
    num_layers_of,
    read_decoder,
)
from worker_service.models.families.positions import (
    read_equal_windows,
    read_longrope,
    read_rope,
    read_share,
    rope_settings,
)
from worker_service.models.families.reading import positive, unserved
from worker_service.models.shard import Split

_QKV = Weight(
    "model.layers.{layer}.self_attn.qkv_proj",
    "layers.{layer}.attention.qkv",
    split=(Split.HEADS, Split.KV_HEADS, Split.KV_HEADS),
)


def _read(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    num_layers, num_positions = num_layers_of(config), positive(config, "max_position_embeddings")
    settings = rope_settings(config, default_share=1.0)
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type in ("longrope", "su", "yarn"):  # as transformers reads them
        share = read_share(config, settings, "partial_rotary_factor", 1.0)
        rope = read_longrope(config, settings, num_positions, share, head_dim_of(config))
    elif rope_type == "default":
        rope, _ = read_rope(config, num_positions, default_share=1.0)
    else:
        raise unserved("rope_type", rope_type, "default or longrope")
    return read_decoder(
        config,
        architecture,
        ropes=((rope,) * num_layers, num_positions),
        windows=read_equal_windows(config, num_layers, default_window=None),
        default_eps=1e-5,
    )


FAMILY = Family(
    ("Phi3ForCausalLM",),
    _read,
    (EMBEDDING, *PRE_NORMS, _QKV, ATTENTION_OUTPUT, *MERGED_MLP, MLP_OUTPUT, *HEAD),
)
