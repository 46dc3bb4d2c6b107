"""Phi-3 (Abdin et al., 2024, https://arxiv.org/abs/2404.14219) and Phi-4.

A Llama whose queries, keys and values are one product, gates and ups another. Phi-4-mini turns a part of each head, and
both stretch positions by LongRoPE.
"""

from worker_service.models.config import JsonObject, ModelConfig
from worker_service.models.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    HEAD,
    LAYER,
    MERGED_MLP,
    MLP_OUTPUT,
    OURS,
    PRE_NORMS,
    Family,
    Weight,
    head_dim_of,
    read_decoder,
)
from worker_service.models.families.positions import (
    read_equal_windows,
    read_longrope,
    read_rope,
    rope_settings,
)
from worker_service.models.families.reading import unserved
from worker_service.models.shard import Split

_QKV = Weight(
    f"{LAYER}.self_attn.qkv_proj",
    f"{OURS}.attention.qkv",
    split=(Split.HEADS, Split.KV_HEADS, Split.KV_HEADS),
)


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    settings = rope_settings(config, default_share=1.0)
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type in ("longrope", "su", "yarn"):  # as transformers reads them
        ropes = read_longrope(config, settings, head_dim_of(config))
    elif rope_type == "default":
        ropes = read_rope(config, default_share=1.0)
    else:
        raise unserved("rope_type", rope_type, "default or longrope")
    return read_decoder(
        config,
        architecture,
        ropes=ropes,
        windows=read_equal_windows(config, default_window=None),
        default_eps=1e-5,
    )


FAMILY = Family(
    ("Phi3ForCausalLM",),
    _read,
    (EMBEDDING, *PRE_NORMS, _QKV, ATTENTION_OUTPUT, *MERGED_MLP, MLP_OUTPUT, *HEAD),
)
