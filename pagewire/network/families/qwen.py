"""Qwen2 (https://arxiv.org/abs/2407.10671) and Qwen3 (https://arxiv.org/abs/2505.09388).

Qwen2 has biases of queries, keys and values. Qwen3 normalizes each head of queries and keys instead. In both, some
layers may have a sliding window. Both have variants with experts in all or some layers; the variant of Qwen2 has a
shared expert with a gate, too.

Qwen3-Next and Qwen3.5 have a gated delta net in three of four layers. In the others, the attended values are multiplied
by gates. Qwen3-Next and a variant of Qwen3.5 have experts and a shared expert with a gate.

Checkpoints of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 contain these models. Their rotary embedding has three
positions for each token (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1), which are equal in a text.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from pagewire.common.gguf import is_whole
from pagewire.network.blocks import layer, shared_expert
from pagewire.network.families.family import Family, TextConfig, inside, norms_of
from pagewire.network.families.positions import (
    FULL,
    SLIDING,
    read_chosen_windows,
    read_layer_types,
    read_rope,
    read_windows,
    rope_settings,
    sliding_window,
)
from pagewire.network.families.reading import (
    JsonObject,
    attention_biases,
    expect,
    flag,
    non_negative,
    num_layers_of,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation
from pagewire.network.stacks import STACKS
from pagewire.network.state_blocks import DeltaNet

_LINEAR = "linear_attention"
_OF_MROPE = ("mrope_section", "mrope_interleaved")


def _read_qwen2(config: JsonObject, architecture: str) -> Network:
    return TextConfig.read(config, architecture, windows=read_chosen_windows(config)).llama(qkv_bias=True)


def _read_qwen2_text(config: JsonObject, architecture: str) -> Network:
    return _read_qwen2(_without_mrope(config, 1_000_000.0), architecture)


def _read_qwen3_text(config: JsonObject, architecture: str) -> Network:
    return _read_qwen3(_without_mrope(config, 500_000.0), architecture)


def _read_qwen3_moe_text(config: JsonObject, architecture: str) -> Network:
    return _read_qwen3_moe({**_without_mrope(config, 500_000.0), "norm_topk_prob": True}, architecture)


def _without_mrope(config: JsonObject, theta: float) -> JsonObject:
    """Return a config.json whose rope settings have no M-RoPE, because it has no effect on texts. `theta` is the
    default of the rope base."""
    settings = rope_settings(config, theta)
    kept = {key: value for key, value in settings.items() if key not in _OF_MROPE and value is not None}
    names = {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta, **kept, **names}}


def _read_qwen3(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(config, architecture, windows=read_chosen_windows(config))
    return text.llama(**attention_biases(config), qk_norm="head")


def _read_qwen2_moe(config: JsonObject, architecture: str) -> Network:
    num_layers = num_layers_of(config)
    windows = (0,) * num_layers
    if flag(config, "use_sliding_window", False):
        num_windowed = non_negative(config, "max_window_layers", 28)
        kinds = [SLIDING if layer < num_windowed and layer % 2 == 0 else FULL for layer in range(num_layers)]
        windows = read_windows(config, kinds)[1]
    text = TextConfig.read(config, architecture, windows=windows)
    mlp = _shared_and_routed(text, 5632, renormalizes=flag(config, "norm_topk_prob", False))
    return text.llama(mlp, qkv_bias=flag(config, "qkv_bias", True))


def _shared_and_routed(
    text: TextConfig, default_size: int, *, renormalizes: bool
) -> Callable[[int, str], Iterator[Operation]]:
    """Return a function that yields the MLP operations of a layer, given its number and name. In layers with experts,
    there is also a shared expert with a gate, by default of `default_size` columns."""
    experts, has_experts = text.experts(renormalizes=renormalizes), _read_expert_layers(text.config)
    shared, dense = text.mlp(positive(text.config, "shared_expert_intermediate_size", default_size)), text.mlp()

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if has_experts[at]:
            yield from experts(f"{name}.mlp.gate", f"{name}.mlp.experts.{{expert}}")
            yield from shared_expert(shared, f"{name}.mlp.shared_expert", f"{name}.mlp.shared_expert_gate")
        else:
            yield from dense(f"{name}.mlp")

    return mlp


def _read_qwen3_moe(config: JsonObject, architecture: str) -> Network:
    window = sliding_window(config) if flag(config, "use_sliding_window", False) else 0
    text = TextConfig.read(config, architecture, windows=(window,) * num_layers_of(config))
    experts = text.experts(renormalizes=flag(config, "norm_topk_prob", False))
    dense, has_experts = text.mlp(), _read_expert_layers(config)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if has_experts[at]:
            yield from experts(f"{name}.mlp.gate", f"{name}.mlp.experts.{{expert}}")
        else:
            yield from dense(f"{name}.mlp")

    return text.llama(mlp, **attention_biases(config), qk_norm="head")


def _read_expert_layers(config: JsonObject) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts instead of a dense MLP. The layers with experts are the layers
    whose number, counted from 1, is a multiple of decoder_sparse_step, except for the layers in mlp_only_layers."""
    step = positive(config, "decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or not all(is_whole(layer) for layer in without):
        raise unserved("mlp_only_layers", without, "a list of layer numbers")
    return tuple(layer not in without and (layer + 1) % step == 0 for layer in range(num_layers_of(config)))


def _read_qwen3_5(config: JsonObject, architecture: str) -> Network:
    text = _read_hybrid(_without_mrope(config, 10_000.0), architecture)
    mlp = text.mlp()
    return _hybrid(text, lambda at, name: mlp(f"{name}.mlp"))


def _read_qwen3_5_moe(config: JsonObject, architecture: str) -> Network:
    # There are experts in all layers, and no dense MLP.
    settings = {"intermediate_size": 1, "decoder_sparse_step": 1, "mlp_only_layers": None}
    text = _read_hybrid({**_without_mrope(config, 10_000.0), **settings}, architecture)
    return _hybrid(text, _shared_and_routed(text, 512, renormalizes=True))


def _read_qwen3_next(config: JsonObject, architecture: str) -> Network:
    text = _read_hybrid(config, architecture)
    mlp = _shared_and_routed(text, 512, renormalizes=flag(config, "norm_topk_prob", True))
    return _hybrid(text, mlp, are_by_head=True)


def _read_hybrid(config: JsonObject, architecture: str) -> TextConfig:
    return TextConfig.read(config, architecture, ropes=read_rope(config, default_share=0.25))


def _hybrid(text: TextConfig, mlp: Callable[[int, str], Iterator[Operation]], *, are_by_head: bool = False) -> Network:
    """Return a model of layers with gated attention and layers with a gated delta net. `mlp` yields the MLP operations
    of a layer, given its number and name. With `are_by_head`, the rows of a delta net are stored by key heads."""
    config, norm, delta_net = text.config, text.norm(adds_one=True), _read_delta_net(text)
    expect(config, "attn_output_gate", True)
    interval = positive(config, "full_attention_interval", 4)
    default = [_LINEAR if (layer + 1) % interval else FULL for layer in range(text.num_layers)]
    kinds = read_layer_types(config, default, (_LINEAR, FULL), FULL)
    settings = {"qk_norm": "head", "norm_adds_one": True, "has_gated_queries": True, **attention_biases(config)}

    def layers(at: int, name: str) -> Iterator[Operation]:
        if kinds[at] == FULL:
            attention = replace(text.attention(at, **settings), layer=kinds[:at].count(FULL))
            mixer = attention(f"{name}.self_attn")
        else:
            mixer = delta_net(f"{name}.linear_attn", are_by_head=are_by_head)
        yield from layer(norm, norms_of(name), mixer, mlp(at, name))

    return text.model(norm, layers)


def _read_delta_net(text: TextConfig) -> DeltaNet:
    config = text.config
    num_heads = positive(config, "linear_num_value_heads", 32)
    num_key_heads = positive(config, "linear_num_key_heads", 16)
    if num_heads % num_key_heads:
        raise unserved("linear_num_key_heads", num_key_heads, f"a divisor of linear_num_value_heads, {num_heads}")
    key_dim, value_dim = (positive(config, f"linear_{kind}_head_dim", 128) for kind in ("key", "value"))
    kernel_size = positive(config, "linear_conv_kernel_dim", 4, least=2)
    return DeltaNet(text.hidden_size, num_heads, num_key_heads, key_dim, value_dim, kernel_size, text.norm_eps)


QWEN2 = Family(("Qwen2ForCausalLM",), _read_qwen2)
QWEN3 = Family(("Qwen3ForCausalLM",), _read_qwen3, defaults={"head_dim": 128})
QWEN2_MOE = Family(("Qwen2MoeForCausalLM",), _read_qwen2_moe)
QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), _read_qwen3_moe)
# The text models of multimodal checkpoints.
_QWEN2_TEXT = Family((), _read_qwen2_text, defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5})
QWEN2_VL, QWEN2_5_VL = (
    inside(
        _QWEN2_TEXT,
        f"{name}ForConditionalGeneration",
        (f"{model_type}_text", model_type),
        is_tied=False,
        is_flat=True,
    )
    for name, model_type in (("Qwen2VL", "qwen2_vl"), ("Qwen2_5_VL", "qwen2_5_vl"))
)
QWEN3_VL = inside(
    Family((), _read_qwen3_text, defaults={"num_key_value_heads": 32, "head_dim": 128}),
    "Qwen3VLForConditionalGeneration",
    ("qwen3_vl_text",),
    is_tied=False,
)
QWEN3_VL_MOE = inside(
    Family(
        (),
        _read_qwen3_moe_text,
        defaults={"num_key_value_heads": 16},
        stacks={name: replace(stack, is_transposed=None) for name, stack in STACKS.items()},
    ),
    "Qwen3VLMoeForConditionalGeneration",
    ("qwen3_vl_moe_text",),
    is_tied=False,
)
QWEN3_5 = Family(("Qwen3_5ForCausalLM",), _read_qwen3_5, defaults={"num_key_value_heads": 4, "head_dim": 256})
QWEN3_5_VL = inside(QWEN3_5, "Qwen3_5ForConditionalGeneration", ("qwen3_5_text",), is_tied=False)
_OF_MOE = {"num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512}
QWEN3_5_MOE = Family(
    ("Qwen3_5MoeForCausalLM",), _read_qwen3_5_moe, defaults={**_OF_MOE, "num_experts": 256, "num_experts_per_tok": 8}
)
QWEN3_5_MOE_VL = inside(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",), is_tied=False)
QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",), _read_qwen3_next, defaults={**_OF_MOE, "num_experts": 512, "num_experts_per_tok": 10}
)
