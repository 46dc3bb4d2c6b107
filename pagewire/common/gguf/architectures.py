"""The supported architectures of GGUF files: their names in config.json, and the settings specific to each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.common.gguf.file import GgufError, GgufFile, Metadata

ROPE_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model architecture that a GGUF file may name in general.architecture, and that this project supports. The
    fields say how the file's metadata is converted to a config.json.
    """

    in_config: str  # the architecture's name in config.json
    settings: Callable[[Metadata], dict[str, Any]] = lambda keys: {}  # further settings, named as in config.json
    others: tuple[str, ...] = ()  # architectures that only config.json distinguishes from this architecture
    # Keys that change the computation of this architecture, and are unsupported elsewhere.
    served: frozenset[str] = frozenset()
    adds_one_to_norms: bool = False  # for norms, files store 1 + w and checkpoint directories store w
    turns_a_part: bool = False  # rope.dimension_count may be smaller than the head dimension
    has_rope_factors: bool = False  # LongRoPE factors are stored as tensors, for short and for long sequences
    rounds_yarn: bool = True  # round the bounds between which YaRN blends frequencies


def _llama(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings that are specific to the GGUF architecture "llama". Mistral models have this
    architecture too: if the file has a sliding window, return the settings of a Mistral model.
    """
    window = keys.whole("attention.sliding_window", 0)
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}


def _gemma2(keys: Metadata) -> dict[str, Any]:
    return {
        **_gemma(keys, large=46),
        "sliding_window": keys.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings specific to a Gemma 3 model in a GGUF file. If the file has no sliding window,
    all layers have full attention.
    """
    window = keys.whole("attention.sliding_window", 0)
    # As in config.json, rope scaling applies only to layers without a window.
    return {
        **_gemma(keys, large=62),
        "sliding_window": window or None,
        "sliding_window_pattern": keys.whole("attention.sliding_window_pattern", 6) if window else 1,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma(keys: Metadata, large: int) -> dict[str, Any]:
    """Return the config.json settings that Gemma 2 and Gemma 3 models in GGUF files share. `large` is the number of
    layers of the largest model. As in llama.cpp, this model scales attention scores differently from the others.
    """
    head_dim = keys.whole("attention.key_length")
    is_large = keys.whole("block_count") == large
    scalar = keys.whole("embedding_length") // keys.whole("attention.head_count") if is_large else head_dim
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def _phi3(keys: Metadata) -> dict[str, Any]:
    return {"sliding_window": keys.whole("attention.sliding_window", 0) or None}


def _qwen3moe(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings for the experts of a Qwen3 MoE model in a GGUF file. As in llama.cpp, every layer
    has experts, and the weights of the chosen experts are normalized to a sum of 1.
    """
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gpt_oss(keys: Metadata) -> dict[str, Any]:
    """Return the config.json settings for the experts and the sliding window of a gpt-oss model in a GGUF file.

    Every other layer has a window, starting with the first layer. The settings contain no layer_types, because a
    config.json without layer_types has this meaning. Raises GgufError for another pattern of windows.
    """
    if keys.has("attention.sliding_window_pattern") and keys.whole("attention.sliding_window_pattern") != 2:
        raise keys.error("attention.sliding_window_pattern", "2: no other value is supported")
    return {
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "sliding_window": keys.whole("attention.sliding_window"),
    }


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", _llama, others=("MistralForCausalLM",), served=frozenset({"attention.sliding_window"})
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe, served=frozenset({"expert_count"})),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _gemma2,
        served=frozenset({"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
        adds_one_to_norms=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _gemma3,
        served=frozenset({"attention.sliding_window", "final_logit_softcapping"}),
        adds_one_to_norms=True,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _phi3,
        served=frozenset({"attention.sliding_window"}),
        turns_a_part=True,
        has_rope_factors=True,
    ),
    # ggml rounds the bounds of YaRN; the model was trained without rounding.
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _gpt_oss,
        served=frozenset({"expert_count", "attention.sliding_window"}),
        rounds_yarn=False,
    ),
}


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
