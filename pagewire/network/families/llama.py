"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971) with grouped-query attention (Ainslie et al., 2023,
https://arxiv.org/abs/2305.13245), and models that differ little from it.

Dense Granite 3 (https://arxiv.org/abs/2405.04324 describes its predecessors) has the four factors of maximal update
parametrization (https://arxiv.org/abs/2203.03466). Seed-OSS (ByteDance Seed, 2025,
https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Base) has separate settings for the biases of queries, keys and
values, and for the bias of attention's output. In SmolLM3 (Bakouch et al., 2025, https://huggingface.co/blog/smollm3),
one layer of four has no positions (NoPE, https://arxiv.org/abs/2501.18795), and only these layers may have a sliding
window. Arcee (2025, https://huggingface.co/arcee-ai/AFM-4.5B) has a plain MLP with squared ReLU
(https://arxiv.org/abs/2109.08668). Dense Granite 4 (2025, https://huggingface.co/ibm-granite/granite-4.0-1b) has
Granite 3's factors, and may have no positions. Dense Hunyuan V1 (Tencent, 2025,
https://huggingface.co/tencent/Hunyuan-7B-Instruct) normalizes heads after it has rotated them. Apertus (Swiss AI
Initiative, 2025, https://arxiv.org/abs/2509.14233) normalizes them before, and has a plain MLP with the activation
xIELU.

Llama 4 (Meta, 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/) rotates heads in pairs of neighbours,
and normalizes rotated queries and keys. One layer of four has no positions; there, queries may grow with their
position. Some or all layers have a shared expert, and one expert per token, whose input is multiplied by its sigmoid
score. Layers with positions attend within chunks of `attention_chunk_size` tokens. Sequences are at most as long as a
chunk here, so that all layers attend to all preceding positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from pagewire.common.gguf import is_whole
from pagewire.network.blocks import activation, layer, shared_expert
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, head_dim_of, inside, norms_of
from pagewire.network.families.positions import (
    FULL,
    SLIDING,
    read_layer_types,
    read_rope,
    rope_settings,
    sliding_window,
)
from pagewire.network.families.reading import (
    JsonObject,
    attention_biases,
    expect,
    flag,
    num_layers_of,
    number,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Activate, Operation, Share, Vector
from pagewire.network.rope import QueryScaling
from pagewire.network.stacks import STACKS


def _read_llama(config: JsonObject, architecture: str) -> Network:
    has_mlp_bias = flag(config, "mlp_bias", False)
    return TextConfig.read(config, architecture).llama(**attention_biases(config), has_mlp_bias=has_mlp_bias)


def _read_granite(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(config, architecture)
    mlp = text.mlp(has_bias=flag(config, "mlp_bias", False))
    return _granite(text, lambda name: mlp(f"{name}.mlp"))


def _granite(text: TextConfig, mlp: Callable[[str], Iterator[Operation]]) -> Network:
    config, norm, biases = text.config, text.norm(), attention_biases(text.config)
    scale, factor = number(config, "attention_multiplier", 1.0), number(config, "residual_multiplier", 1.0)

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at, text.heads(at, scale), **biases)(f"{name}.self_attn")
        yield from layer(norm, norms_of(name), attention, mlp(name), factor=factor)

    embedding_factor, divisor = number(config, "embedding_multiplier", 1.0), number(config, "logits_scaling", 1.0)
    return text.model(norm, layers, embedding_factor=embedding_factor, logits_factor=1 / divisor)


def _read_granite4(config: JsonObject, architecture: str) -> Network:
    """Read a model of the hybrid architecture of Granite 4 that has neither Mamba layers nor experts."""
    if config.get("num_local_experts") != 0:
        raise unserved("num_local_experts", config.get("num_local_experts", 8), "0: experts are not supported")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ("attention", FULL) for kind in kinds):
        raise unserved("layer_types", kinds, "attention throughout: Mamba layers are not supported")
    ropes, num_positions = read_rope(config)
    kind = config.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        raise unserved("position_embedding_type", kind, "rope, nope or null")
    ropes = ropes if kind == "rope" else (None,) * len(ropes)
    text = TextConfig.read(config, architecture, ropes=(ropes, num_positions))
    mlp = text.mlp(positive(config, "shared_intermediate_size", 1024))
    return _granite(text, lambda name: mlp(f"{name}.shared_mlp", ("input_linear",), "output_linear"))


def _read_arcee(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(config, architecture, default_eps=1e-5, activations=("relu2",))
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=flag(config, "mlp_bias", False))
    return text.llama(lambda at, name: mlp(f"{name}.mlp", ("up_proj",)), **attention_biases(config))


def _read_seed_oss(config: JsonObject, architecture: str) -> Network:
    return TextConfig.read(config, architecture).llama(
        qkv_bias=flag(config, "attention_bias", True),
        output_bias=flag(config, "attention_out_bias", False),
        has_mlp_bias=flag(config, "mlp_bias", False),
    )


def _read_smollm3(config: JsonObject, architecture: str) -> Network:
    has_rope = _layers_with_rope(config)
    ropes, num_positions = read_rope(config, default_theta=2_000_000.0)
    window = sliding_window(config, None) if flag(config, "use_sliding_window", False) else 0
    default_types = [SLIDING if window and not has else FULL for has in has_rope]
    layer_types = read_layer_types(config, default_types, (FULL, SLIDING) if window else (FULL,))
    text = TextConfig.read(
        config,
        architecture,
        ropes=(tuple(rope if has else None for rope, has in zip(ropes, has_rope, strict=True)), num_positions),
        windows=tuple(window if layer_type == SLIDING else 0 for layer_type in layer_types),
    )
    return text.llama(**attention_biases(config), has_mlp_bias=flag(config, "mlp_bias", False))


def _read_llama4(config: JsonObject, architecture: str) -> Network:
    has_rope = _layers_with_rope({**config, "no_rope_layers": config.get("no_rope_layers") or None})
    read_layer_types(config, [FULL] * len(has_rope), (FULL, "chunked_attention"))
    (rope, *_), num_positions = read_rope(config, default_theta=500_000.0, is_interleaved=True)
    if rope is not None and rope.attention_factor != 1:
        raise unserved("rope_type", rope.rope_type, "default, linear or llama3")
    ropes = tuple(rope if has else None for has in has_rope)
    num_positions = min(num_positions, positive(config, _CHUNK, 8192))
    text = TextConfig.read(config, architecture, ropes=(ropes, num_positions), default_eps=1e-5)
    growth = None
    if config.get("attn_temperature_tuning", True):
        beta, interval = number(config, "attn_scale", 0.1), positive(config, "floor_scale", 8192)
        growth = QueryScaling(beta, interval, offset=1)
    qk_norm, biases = "unweighted" if flag(config, "use_qk_norm", True) else "none", attention_biases(config)
    norm, mlp = text.norm(), _llama4_mlp(text)

    def layers(at: int, name: str) -> Iterator[Operation]:
        how = {"qk_norm": qk_norm} if has_rope[at] else {"growth": growth}
        attention = text.attention(at, **biases, **how)(f"{name}.self_attn")
        yield from layer(norm, norms_of(name), attention, mlp(at, f"{name}.feed_forward"))

    return text.model(norm, layers)


def _llama4_mlp(text: TextConfig) -> Callable[[int, str], Iterator[Operation]]:
    """Return a function that yields the operations of a layer's MLP or experts, given the layer's number and the MLP's
    name."""
    config, step = text.config, positive(text.config, "interleave_moe_layer_step", 1)
    moe_layers = config.get("moe_layers")
    moe_layers = list(range(step - 1, text.num_layers, step)) if moe_layers is None else moe_layers
    if not isinstance(moe_layers, list) or not all(map(is_whole, moe_layers)):
        raise unserved("moe_layers", moe_layers, "a list of layer numbers")
    if config.get("num_experts_per_tok") != 1:
        raise unserved("num_experts_per_tok", config.get("num_experts_per_tok"), "1")
    dense = text.mlp(positive(config, "intermediate_size_mlp", 16_384))
    experts = text.experts("num_local_experts", "intermediate_size", scoring="sigmoid", renormalizes=False)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if at in moe_layers:
            yield from experts(f"{name}.router", f"{name}.experts.{{expert}}", weighs_input=True)
            yield from shared_expert(text.mlp(), f"{name}.shared_expert")
        else:
            yield from dense(name)

    return mlp


def _layers_with_rope(config: JsonObject) -> list[bool]:
    num_layers = num_layers_of(config)
    interval = positive(config, "no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")  # one number per layer; 1: the layer has positions
    if given is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(has not in (0, 1) for has in given):
        raise unserved("no_rope_layers", given, f"a list of 0 and 1 as long as num_hidden_layers, {num_layers}")
    return [bool(has) for has in given]


def _read_hunyuan(config: JsonObject, architecture: str) -> Network:
    expect(config, "use_qk_norm", True)
    text = TextConfig.read(_with_scaled_base(config), architecture, default_eps=1e-5)
    return text.llama(**attention_biases(config), qk_norm="head", rotates_first=True)


def _with_scaled_base(config: JsonObject) -> JsonObject:
    """Return a config.json without the rope type "dynamic" of Hunyuan. For heads of size d, this type multiplies the
    rope base by alpha ** (d / (d - 2)), independent of the length of a sequence."""
    settings, head_dim = rope_settings(config), head_dim_of(config)
    if (settings.get("rope_type") or settings.get("type")) != "dynamic" or not settings.get("alpha"):
        return config
    # A head of size 2 has a single frequency, which no base changes.
    scale = number(settings, "alpha") ** (head_dim / max(1, head_dim - 2))
    theta = scale * number(settings, "rope_theta", 10_000.0)
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}


def _read_apertus(config: JsonObject, architecture: str) -> Network:
    for key, expected in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
        expect(config, key, expected)
    ropes = read_rope(config, default_theta=12_000_000.0)
    text = TextConfig.read(config, architecture, ropes=ropes, default_eps=1e-5, activations=("xielu",))
    norm, how = text.norm(), {**attention_biases(config), "qk_norm": "head"}

    def layers(at: int, name: str) -> Iterator[Operation]:
        norms, parts = (f"{name}.attention_layernorm", f"{name}.feedforward_layernorm"), _XIELU_PARAMETERS
        parameters = Vector(f"{name}.mlp.act_fn", Share.of(len(parts)), is_float32=True, parts=parts)
        mlp = text.mlp(activation=Activate("", "", text.activation, parameters=parameters))
        yield from layer(norm, norms, text.attention(at, **how)(f"{name}.self_attn"), mlp(f"{name}.mlp", ("up_proj",)))

    return text.model(norm, layers)


LLAMA = Family(("LlamaForCausalLM",), _read_llama)
GRANITE = Family(("GraniteForCausalLM",), _read_granite)
GRANITE4 = Family(("GraniteMoeHybridForCausalLM",), _read_granite4)
ARCEE = Family(("ArceeForCausalLM",), _read_arcee)
SEED_OSS = Family(("SeedOssForCausalLM",), _read_seed_oss, defaults={"num_key_value_heads": 8, "head_dim": 128})
SMOLLM3 = Family(
    ("SmolLM3ForCausalLM",), _read_smollm3, defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}
)
_XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")
APERTUS = Family(
    ("ApertusForCausalLM",),
    _read_apertus,
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 12_000_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)
_HUNYUAN_NORMS = ((r"\.q_norm\.", ".query_layernorm."), (r"\.k_norm\.", ".key_layernorm."))
HUNYUAN = Family(
    ("HunYuanDenseV1ForCausalLM",),
    _read_hunyuan,
    renamings=tuple((*_HUNYUAN_NORMS, *prefix) for prefix in ((), WITHOUT_PREFIX)),
    model_type="hunyuan_v1_dense",
)
_CHUNK = "attention_chunk_size"
LLAMA4 = Family(
    ("Llama4ForCausalLM",),
    _read_llama4,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        _CHUNK: 8192,
    },
    length_key=_CHUNK,
    stacks={name: replace(stack, is_transposed=True) for name, stack in STACKS.items()},
)
LLAMA4_TEXT = inside(LLAMA4, "Llama4ForConditionalGeneration", ("llama4_text",), is_tied=False)
