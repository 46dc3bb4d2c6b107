"""Qwen2 (https://arxiv.org/abs/2407.10671): biases of queries, keys and values. Qwen3 (https://arxiv.org/abs/2505.09388)
normalizes each head of queries and keys instead. In both some layers may have a sliding window. Both have relatives
whose layers, or some of them, have experts; of Qwen2's one is shared, and has a gate."""

from pagewire.common.gguf import is_whole
from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    EXPERTS,
    GATED_MLP,
    HEAD,
    HEAD_NORMS,
    LAYER,
    LLAMA_WEIGHTS,
    MLP_OUTPUT,
    OURS,
    PRE_NORMS,
    QKV,
    ROUTER,
    Family,
    Weight,
    in_dense_layers,
    read_decoder,
    read_experts,
    shared_expert,
)
from pagewire.common.network.families.positions import FULL, SLIDING, read_chosen_windows, read_windows, sliding_window
from pagewire.common.network.families.reading import (
    attention_biases,
    flag,
    from_zero,
    num_layers_of,
    positive,
    unserved,
)

_DENSE = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *in_dense_layers((*GATED_MLP, MLP_OUTPUT)), *HEAD, ROUTER)
_SHARED = (
    *shared_expert("shared_expert"),
    Weight(f"{LAYER}.mlp.shared_expert_gate", f"{OURS}.mlp.shared_gate", layers="experts"),
)


def _read_qwen2(config: JsonObject, architecture: str) -> ModelConfig:
    return read_decoder(config, architecture, windows=read_chosen_windows(config), qkv_bias=True)


def _read_qwen3(config: JsonObject, architecture: str) -> ModelConfig:
    windows = read_chosen_windows(config)
    return read_decoder(config, architecture, windows=windows, **attention_biases(config), qk_norm="head")


def _read_qwen2_moe(config: JsonObject, architecture: str) -> ModelConfig:
    num_layers = num_layers_of(config)
    windows = (0,) * num_layers
    if flag(config, "use_sliding_window", False):
        num_windowed = from_zero(config, "max_window_layers", 28)
        kinds = [SLIDING if layer < num_windowed and layer % 2 == 0 else FULL for layer in range(num_layers)]
        windows = read_windows(config, kinds)[1]
    experts = read_experts(
        config,
        renormalizes=flag(config, "norm_topk_prob", False),
        shared_intermediate_size=positive(config, "shared_expert_intermediate_size", 5632),
        has_shared_gate=True,
    )
    expert_layers = _read_expert_layers(config)
    has_bias = flag(config, "qkv_bias", True)
    return read_decoder(
        config, architecture, windows=windows, qkv_bias=has_bias, experts=experts, expert_layers=expert_layers
    )


def _read_qwen3_moe(config: JsonObject, architecture: str) -> ModelConfig:
    window = sliding_window(config) if flag(config, "use_sliding_window", False) else 0
    return read_decoder(
        config,
        architecture,
        windows=(window,) * num_layers_of(config),
        **attention_biases(config),
        qk_norm="head",
        experts=read_experts(config, renormalizes=flag(config, "norm_topk_prob", False)),
        expert_layers=_read_expert_layers(config),
    )


def _read_expert_layers(config: JsonObject) -> tuple[bool, ...]:
    """Each layer whose number, from 1, decoder_sparse_step divides has experts, but those of mlp_only_layers."""
    step = positive(config, "decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(is_whole(layer) for layer in without):
        raise unserved("mlp_only_layers", without, "a list of numbers of layers")
    return tuple(layer not in without and (layer + 1) % step == 0 for layer in range(num_layers_of(config)))


QWEN2 = Family(("Qwen2ForCausalLM",), _read_qwen2, LLAMA_WEIGHTS)
QWEN3 = Family(("Qwen3ForCausalLM",), _read_qwen3, (*LLAMA_WEIGHTS, *HEAD_NORMS), defaults={"head_dim": 128})
QWEN2_MOE = Family(
    ("Qwen2MoeForCausalLM",),
    _read_qwen2_moe,
    (*_DENSE, *_SHARED, *EXPERTS),
)
QWEN3_MOE = Family(
    ("Qwen3MoeForCausalLM",),
    _read_qwen3_moe,
    (*_DENSE, *HEAD_NORMS, *EXPERTS),
)
