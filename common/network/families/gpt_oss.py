"""gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925): experts in all layers, whose gates and ups are clamped, a
sink in each head's softmax, and windows in every other layer. Experts are published in MXFP4."""

from dataclasses import replace

from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYER,
    OURS,
    PRE_NORMS,
    QKV,
    Family,
    Split,
    Weight,
    read_decoder,
    read_experts,
)
from pagewire.common.network.families.positions import FULL, SLIDING, read_rope, read_windows
from pagewire.common.network.families.reading import attention_biases, num_layers_of, number
from pagewire.common.network.stacks import STACKS

_WEIGHTS = (
    EMBEDDING,
    *PRE_NORMS,
    *QKV,
    ATTENTION_OUTPUT,
    Weight(f"{LAYER}.self_attn", f"{OURS}.attention", split=Split.HEAD_VALUES),  # sinks
    Weight(f"{LAYER}.mlp.router", f"{OURS}.mlp.router"),
    *EXPERTS,
    *HEAD,
)
# What files may leave out.
_DEFAULTS = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    num_layers = num_layers_of(config)
    default_types = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    _, windows = read_windows(config, default_types, default_window=128)
    model = read_decoder(
        config,
        architecture,
        ropes=read_rope(config, default_theta=150_000.0),
        windows=windows,
        default_eps=1e-5,
        **attention_biases(config, True),
        has_sinks=True,
        experts=read_experts(config, "num_local_experts", "intermediate_size", has_router_bias=True, bias=True),
        expert_layers=(True,) * num_layers,
        swiglu_alpha=number(config, "swiglu_alpha", 1.702),
        swiglu_limit=number(config, "swiglu_limit", 7.0),
    )
    return replace(model, activation="clamped_swiglu")


FAMILY = Family(
    ("GptOssForCausalLM",),
    _read,
    _WEIGHTS,
    defaults=_DEFAULTS,
    default_rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    stacks={name: replace(stack, takes_turns=True, is_transposed=True) for name, stack in STACKS.items()},
)
