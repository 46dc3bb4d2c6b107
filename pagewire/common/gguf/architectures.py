"""The supported architectures of GGUF files: their names in config.json, and the settings specific to each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.common.gguf.file import GgufError, GgufFile, Metadata

ROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
# A key of a file's metadata, without the architecture's prefix, and its value if the file lacks the key. A type instead
# of a value means that the key is required. If the value is the number 0, then a 0 in the file becomes null, too.
Setting = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model architecture that a GGUF file may name in general.architecture, and that this project supports. The
    fields say how the file's metadata is converted to a config.json.
    """

    in_config: str  # the architecture's name in config.json
    settings: Mapping[str, Setting] = field(default_factory=dict)  # by their names in config.json
    constants: Mapping[str, Any] = field(default_factory=dict)  # settings that all files of this architecture share
    more: Callable[[Metadata], dict[str, Any]] = lambda keys: {}  # further settings
    # Other names in config.json of settings that all architectures have.
    names: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # architectures that only config.json distinguishes from this architecture
    # Keys that change the computation of this architecture, and are unsupported elsewhere, besides those of `settings`.
    served: frozenset[str] = frozenset()
    expected: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # the only supported values of some keys
    # One layer of this many has no sliding window, unless the file says otherwise; 0: windows do not depend on layers.
    window_period: int = 0
    has_layer_norms: bool = False  # norms are layer norms, whose epsilon has another key
    adds_one_to_norms: bool = False  # for norms, files store 1 + w and checkpoint directories store w
    turns_a_part: bool = False  # rope.dimension_count may be smaller than the head dimension
    # The rows of query and key projections pair neighbours within a head; checkpoint directories pair halves.
    pairs_neighbours: bool = False
    has_rope_factors: bool = False  # LongRoPE factors are stored as tensors, for short and for long sequences
    # Value heads of the gated delta rule are stored in the order in which ggml repeats key heads: head h uses key head
    # h % num_key_heads. In checkpoint directories, the heads that use the same key head are adjacent.
    has_tiled_heads: bool = False
    is_sparse: bool = False  # all layers have experts: the file may lack the length of dense MLPs
    skips_attention: bool = False  # layers without attention have 0 key-value heads
    rounds_yarn: bool = True  # round the bounds between which YaRN blends frequencies


_WINDOW: dict[str, Setting] = {"sliding_window": ("attention.sliding_window", 0)}
_LOGIT_CAP: dict[str, Setting] = {"final_logit_softcapping": ("final_logit_softcapping", 0.0)}
_CHOSEN: dict[str, Setting] = {"num_experts_per_tok": ("expert_used_count", int)}
_LOCAL_EXPERTS: dict[str, Setting] = {"num_local_experts": ("expert_count", int), **_CHOSEN}
_EXPERTS: dict[str, Setting] = {
    "num_experts": ("expert_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
    **_CHOSEN,
}
# Experts as in DeepSeek-V3.
_GROUPED_EXPERTS: dict[str, Setting] = {
    "n_routed_experts": ("expert_count", int),
    "n_shared_experts": ("expert_shared_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
    "routed_scaling_factor": ("expert_weights_scale", 0.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 0),
    "topk_group": ("expert_group_used_count", 0),
    **_CHOSEN,
}
_SIGMOID: dict[str, tuple[object, ...]] = {"expert_gating_func": (2,)}
_PARALLEL: dict[str, Setting] = {"use_parallel_residual": ("use_parallel_residual", bool)}


def _llama(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings that are specific to the GGUF architecture "llama". Mistral and Mixtral models
    have this architecture too: if the file has experts or a sliding window, return the settings of such a model.
    """
    if keys.whole("expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], **settings_of(keys, _LOCAL_EXPERTS)}
    window = keys.whole("attention.sliding_window", 0)
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}


def _olmo2(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings specific to OLMo 2 and OLMo 3, which adds sliding windows."""
    return {"architectures": ["Olmo3ForCausalLM"]} if keys.whole("attention.sliding_window", 0) else {}


def _gemma(large: int) -> Callable[[Metadata], dict[str, Any]]:
    """Return a function that returns the config.json settings that Gemma 2 and Gemma 3 models in GGUF files share.
    `large` is the number of layers of the largest model. As in llama.cpp, this model scales attention scores
    differently from the others.
    """

    def read(keys: Metadata) -> dict[str, Any]:
        head_dim = keys.whole("attention.key_length")
        is_large = keys.whole("block_count") == large
        scalar = keys.whole("embedding_length") // keys.whole("attention.head_count") if is_large else head_dim
        return {"query_pre_attn_scalar": scalar}

    return read


def _glm4_moe(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings for the layers of a GLM-4.5 model in a GGUF file."""
    return {
        **_predicting_layers(keys),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
    }


def _predicting_layers(keys: Metadata) -> dict[str, Any]:
    """Return the numbers of layers of a model with layers for multi-token prediction, by their names in config.json.
    The number of layers in the file includes these layers, which are the last ones.
    """
    num_further, num_layers = keys.whole("nextn_predict_layers", 0), keys.whole("block_count")
    if num_further >= num_layers:
        raise keys.error("nextn_predict_layers", f"less than the {num_layers} layers of the file")
    return {"num_hidden_layers": num_layers - num_further, "num_nextn_predict_layers": num_further}


def _delta_net(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings for the layers of a model with gated delta nets: the sizes of their heads, and
    which layers have attention instead. A file has a flag for each layer, which is true for a delta net, or the number
    of layers of which the last has attention.
    """
    layers, interval = _predicting_layers(keys), keys.whole("full_attention_interval", 4)
    size = keys.whole("ssm.state_size") * keys.whole("ssm.time_step_rank")
    if keys.whole("ssm.inner_size") != size:
        raise keys.error("ssm.inner_size", f"{size}, the product of ssm.state_size and ssm.time_step_rank")
    if not interval:
        raise keys.error("full_attention_interval", "a whole number from 1")
    num_layers = layers["num_hidden_layers"]
    flags = keys.numbers("attention.recurrent_layers", keys.whole("block_count"))
    are_linear = flags or [(layer + 1) % interval for layer in range(num_layers)]
    kinds = ["linear_attention" if each else "full_attention" for each in are_linear[:num_layers]]
    return {**layers, "layer_types": kinds}


def _lfm2(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings for the layers of an LFM2 model: layers without key-value heads have a short
    convolution instead of attention.
    """
    heads = keys.numbers("attention.head_count_kv", keys.whole("block_count")) or ()
    return {
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "num_dense_layers": keys.whole("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors),
    }


def _mpt(keys: Metadata) -> dict[str, Any]:
    bias_max = keys.number("attention.max_alibi_bias")
    if not bias_max.is_integer():
        raise keys.error("attention.max_alibi_bias", "a whole number")
    attention = {"alibi": True, "alibi_bias_max": int(bias_max), "clip_qkv": keys.number("attention.clamp_kqv", 0.0)}
    width, num_columns = keys.whole("embedding_length"), keys.whole("feed_forward_length")
    if not width or num_columns % width:
        raise keys.error("feed_forward_length", f"a multiple of embedding_length, {width}")
    return {
        "attn_config": attention,
        "expansion_ratio": num_columns // width,
        "no_bias": "blk.0.attn_norm.bias" not in keys.file.tensors,
    }


_DELTA_NET: dict[str, Setting] = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_value_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
    "linear_num_value_heads": ("ssm.time_step_rank", int),
}
_SHARED_EXPERT: dict[str, Setting] = {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
_SHORT_CONVOLUTION: dict[str, Setting] = {"conv_L_cache": ("shortconv.l_cache", int)}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    _DELTA_NET,
    more=_delta_net,
    served=frozenset({"nextn_predict_layers"}),
    adds_one_to_norms=True,
    has_tiled_heads=True,
    turns_a_part=True,
)
_QWEN35_MOE = replace(
    _QWEN35,
    in_config="Qwen3_5MoeForCausalLM",
    settings={**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
    is_sparse=True,
)
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    _SHORT_CONVOLUTION,
    {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    _lfm2,
    names={"norm_eps": "rms_norm_eps"},
    skips_attention=True,
)
_QWEN3_MOE = Architecture("Qwen3MoeForCausalLM", _EXPERTS, {"norm_topk_prob": True})
ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        more=_llama,
        others=("MistralForCausalLM", "MixtralForCausalLM"),
        served=frozenset({"attention.sliding_window", "expert_count"}),
        pairs_neighbours=True,
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        served=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
        pairs_neighbours=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        {
            "attention_multiplier": ("attention.scale", float),
            "embedding_multiplier": ("embedding_scale", 0.0),
            "residual_multiplier": ("residual_scale", 0.0),
            "logits_scaling": ("logit_scale", float),
        },
        served=frozenset({"expert_shared_feed_forward_length"}),  # without experts, it has no effect
        expected={"rope.scaling.finetuned": (True,)},  # false: a model without positions
        pairs_neighbours=True,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs_neighbours=True),
    "arcee": Architecture("ArceeForCausalLM", constants={"hidden_act": "relu2"}, pairs_neighbours=True),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", names={"use_bias": "attention_bias"}),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        more=lambda keys: {"attention_out_bias": "blk.0.attn_output.bias" in keys.file.tensors},
    ),
    # Qwen2-VL and Qwen3-VL rotate texts as the models without images do.
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("Qwen2ForCausalLM")),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("Qwen3ForCausalLM")),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QWEN3_MOE),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, **_SHARED_EXPERT},
        {"norm_topk_prob": False},
        names={"qkv_bias": "attention_bias"},
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": replace(
        _QWEN35_MOE, in_config="Qwen3NextForCausalLM", constants={"norm_topk_prob": True}, has_tiled_heads=False
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        in_config="Lfm2MoeForCausalLM",
        settings={**_SHORT_CONVOLUTION, **_EXPERTS},
        constants={"conv_bias": False, "norm_topk_prob": True},
        served=frozenset({"leading_dense_block_count"}),
        expected=_SIGMOID,
    ),
    "gemma": Architecture("GemmaForCausalLM", constants={"hidden_act": "gelu_pytorch_tanh"}, adds_one_to_norms=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {
            "sliding_window": ("attention.sliding_window", 4096),
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        {"hidden_activation": "gelu_pytorch_tanh"},
        _gemma(large=46),
        window_period=2,
        adds_one_to_norms=True,
    ),
    # As in config.json, rope scaling applies only to layers without a window.
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {**_WINDOW, **_LOGIT_CAP, "rope_local_base_freq": ("rope.freq_base_swa", 10_000.0)},
        {"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None},
        _gemma(large=62),
        window_period=6,
        adds_one_to_norms=True,
    ),
    "phi3": Architecture("Phi3ForCausalLM", _WINDOW, turns_a_part=True, has_rope_factors=True),
    # ggml rounds the bounds of YaRN; the model was trained without rounding.
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {
            **_LOCAL_EXPERTS,
            "intermediate_size": ("expert_feed_forward_length", int),
            "sliding_window": ("attention.sliding_window", int),
        },
        window_period=2,
        rounds_yarn=False,
    ),
    "olmo": Architecture(
        "OlmoForCausalLM",
        {"clip_qkv": ("attention.clamp_kqv", 0.0)},
        expected={"attention.layer_norm_epsilon": (1e-5,)},
        has_layer_norms=True,
        pairs_neighbours=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", _WINDOW, more=_olmo2, others=("Olmo3ForCausalLM",), window_period=4),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        {"num_experts": ("expert_count", int), **_CHOSEN},
        {"norm_topk_prob": False},
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", _WINDOW, window_period=4),
    "chatglm": Architecture("GlmForCausalLM", turns_a_part=True),
    # Files of GLM-4.1V have these sections, and another order of rows.
    "glm4": Architecture("Glm4ForCausalLM", expected={"rope.dimension_sections": ("unset",)}, turns_a_part=True),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _GROUPED_EXPERTS,
        more=_glm4_moe,
        served=frozenset({"nextn_predict_layers", "leading_dense_block_count"}),
        expected={"expert_gating_func": (0, 2)},
        turns_a_part=True,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        {**_GROUPED_EXPERTS, "first_k_dense_replace": ("leading_dense_block_count", int)},
        {"sliding_window": None},
        expected=_SIGMOID,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {**_LOCAL_EXPERTS, "intermediate_size": ("expert_feed_forward_length", int)},
        expected=_SIGMOID,
        turns_a_part=True,
    ),
    "command-r": Architecture("CohereForCausalLM", {"logit_scale": ("logit_scale", 1.0)}, has_layer_norms=True),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        {"logit_scale": ("logit_scale", float), "sliding_window": ("attention.sliding_window", int)},
        window_period=4,
        has_layer_norms=True,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        _PARALLEL,
        names={"use_qkv_bias": "attention_bias"},
        has_layer_norms=True,
        turns_a_part=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        constants={"hidden_act": "gelu_pytorch_tanh"},
        names={"use_bias": "attention_bias", "norm_epsilon": "layer_norm_eps"},
        has_layer_norms=True,
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        names={
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "layer_norm_eps",
            "bias": "attention_bias",
        },
        expected={"attention.head_count_kv": (1,)},  # Falcon 7B
        has_layer_norms=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", _PARALLEL, {"hidden_act": "gelu"}, has_layer_norms=True, turns_a_part=True
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        names={
            **{"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
            **{"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"},
            "layer_norm_epsilon": "layer_norm_eps",
        },
        has_layer_norms=True,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        names={"seq_length": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps"},
        has_layer_norms=True,
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        more=_mpt,
        names={
            **{"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
            **{"max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps"},
        },
        served=frozenset({"attention.clamp_kqv", "attention.max_alibi_bias"}),
        has_layer_norms=True,
    ),
}


def settings_of(keys: Metadata, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return settings of a GGUF file by their names in config.json. Raises GgufError if a key is missing that is
    required, or if a value has another type than expected.
    """
    return {name: _setting(keys, *setting) for name, setting in settings.items()}


def _setting(keys: Metadata, key: str, default: Any) -> Any:
    kind = default if isinstance(default, type) else type(default)
    readers: dict[type, Callable[..., Any]] = {int: keys.whole, float: keys.number, bool: keys.flag}
    value = readers[kind](key, None if default is kind else default)
    return None if value == default == 0 and kind is not bool else value


def architecture_of(file: GgufFile) -> str:
    """Return the model architecture of a GGUF file, from its key general.architecture. Raises GgufError if the
    architecture is not supported.
    """
    name = Metadata(file, "general.").text("architecture")
    if name not in ARCHITECTURES:
        raise GgufError(
            f"{file.path}: general.architecture is {name!r}, which is not supported; docs/models.md lists the "
            "supported architectures"
        )
    return name
