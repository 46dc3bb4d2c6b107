"""gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925).

All layers have experts, with clamped gates and ups. Each head has a sink in its softmax, and every other layer has a
sliding window. The published experts are in MXFP4.
"""

from collections.abc import Iterator
from dataclasses import replace

from pagewire.network.blocks import activation
from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.positions import FULL, SLIDING, read_rope, read_windows
from pagewire.network.families.reading import JsonObject, attention_biases, num_layers_of, number
from pagewire.network.network import Network
from pagewire.network.operations import Operation
from pagewire.network.stacks import STACKS

# Defaults of settings that files may omit.
_DEFAULTS = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}


def _read(config: JsonObject, architecture: str) -> Network:
    default_types = [FULL if layer % 2 else SLIDING for layer in range(num_layers_of(config))]
    _, windows = read_windows(config, default_types, default_window=128)
    ropes = read_rope(config, default_theta=150_000.0)
    text = TextConfig.read(config, architecture, ropes=ropes, windows=windows, default_eps=1e-5)
    swiglu = activation(
        "clamped_swiglu",
        alpha=number(config, "swiglu_alpha", 1.702),
        limit=number(config, "swiglu_limit", 7.0),
    )
    experts = text.experts("num_local_experts", "intermediate_size", swiglu, has_bias=True)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        yield from experts(f"{name}.mlp.router", f"{name}.mlp.experts.{{expert}}", router_bias=True)

    return text.llama(mlp, **attention_biases(config, True), has_sinks=True)


FAMILY = Family(
    ("GptOssForCausalLM",),
    _read,
    defaults=_DEFAULTS,
    default_rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    stacks={name: replace(stack, is_interleaved=True, is_transposed=True) for name, stack in STACKS.items()},
)
