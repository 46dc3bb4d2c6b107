"""Converts the metadata of a GGUF file to the JSON files of a checkpoint directory: configuration and special tokens.

The services parse these as they parse the files of a checkpoint directory, so that each setting has one meaning. A
setting that changes the computation in an unsupported way is refused by its key; it is never ignored.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from pagewire.common.gguf.architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    Architecture,
    architecture_of,
    settings_of,
)
from pagewire.common.gguf.file import GgufError, GgufFile, Metadata
from pagewire.common.gguf.tokenizer import SpecialTokens
from pagewire.common.wire.sampling_rules import CHECKPOINTS_OPTIONS

# Settings that change the computation, with the values that have no effect.
_INERT: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),  # 0: unset; 1: softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_feed_forward_length": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
    "pooling_type": (0, 1, 3),  # none, mean, last; used for embeddings only
    "nextn_predict_layers": (0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_MAX_LAYERS = 1 << 12
# In float32, whatever the dtype of the model.
_EXACT = (
    *(".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".bias", "position_embd.weight"),
    *(".ssm_conv1d.weight", ".shortconv.conv.weight"),
)
# Sampling options with a different name in GGUF.
_OTHER_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_SAMPLING = {_OTHER_NAMES.get(name, name): name for name in CHECKPOINTS_OPTIONS}


def config_json(file: GgufFile) -> dict[str, Any]:
    """Return the content of a config.json that describes the model in a GGUF file. Raises GgufError if a setting of the
    file is missing or not supported.
    """
    name = architecture_of(file)
    architecture, keys = ARCHITECTURES[name], Metadata(file, f"{name}.")
    _refuse_unsupported(keys, architecture)
    hidden_size, num_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = _head_dim(keys, hidden_size, num_heads, turns_a_part=architecture.turns_a_part)
    of_norms = ("layer_norm_eps", "epsilon") if architecture.has_layer_norms else ("rms_norm_eps", "rms_epsilon")
    config: dict[str, Any] = {
        "architectures": [architecture.in_config],
        "model_type": name,
        "hidden_size": hidden_size,
        "intermediate_size": keys.whole("feed_forward_length", 0 if architecture.is_sparse else None),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.whole(
            "attention.head_count_kv", num_heads, ignores_zeros=architecture.skips_attention
        ),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": keys.whole("context_length"),
        of_norms[0]: keys.number(f"attention.layer_norm_{of_norms[1]}"),
        "hidden_act": "silu",
        "attention_bias": not file.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "use_sliding_window": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **_rope(keys, architecture, head_dim),
        **SpecialTokens.of(file).ids(),
        **architecture.constants,
        **settings_of(keys, architecture.settings),
        **architecture.more(keys),
    }
    if architecture.window_period:
        config["layer_types"] = _layer_types(
            keys, architecture.window_period, has_window=bool(config["sliding_window"])
        )
    return config | {name: config[usual] for name, usual in architecture.names.items()}


def generation_config_json(file: GgufFile) -> dict[str, Any]:
    """Return the content of a generation_config.json with the sampling defaults of a GGUF file. Sampling settings of
    the file that have no counterpart in generation_config.json are included under their GGUF keys. Raises GgufError if
    a value has a wrong type.
    """
    sampling = Metadata(file, "general.sampling.")
    found: dict[str, Any] = {name: sampling.number(key) for key, name in _SAMPLING.items() if sampling.has(key)}
    if "top_k" in found:
        found["top_k"] = file.metadata["general.sampling.top_k"]  # may be -1
    read = {sampling.prefix + key for key in _SAMPLING}
    found |= {key: value for key, value in file.metadata.items() if key.startswith(sampling.prefix) and key not in read}
    tokenizer = Metadata(file, "tokenizer.ggml.")
    suppressed = tokenizer.numbers("suppress_tokens")
    # As in llama.cpp, ids that no token can have are dropped.
    return found if suppressed is None else {**found, "suppress_tokens": [id for id in suppressed if id >= 0]}


def tokenizer_config_json(file: GgufFile) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json with the chat template of a GGUF file, and with the special tokens
    that the template uses. Raises GgufError if a value has a wrong type.
    """
    found: dict[str, Any] = dict(SpecialTokens.of(file).texts())
    keys = Metadata(file, "tokenizer.")
    if keys.has("chat_template"):
        found["chat_template"] = keys.text("chat_template")
    more = [key.removeprefix(keys.prefix) for key in file.metadata if key.startswith(f"{keys.prefix}chat_template.")]
    if more:
        named = {"default": keys.text("chat_template", "")}
        named |= {key.removeprefix("chat_template."): keys.text(key) for key in more}
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text]
    return found


def _refuse_unsupported(keys: Metadata, architecture: Architecture) -> None:
    served = architecture.served.union(key for key, _ in architecture.settings.values())
    for key, inert in {**_INERT, **architecture.expected}.items():
        value = keys.file.metadata.get(keys.prefix + key)
        if value is not None and key not in served and value not in inert:
            raise keys.error(key, f"{inert[-1]!r}: no other value is supported")


def _layer_types(keys: Metadata, period: int, *, has_window: bool) -> list[str]:
    """Return the attention type of each layer. A file may have a flag for each layer, which is true for a sliding
    window, or the number of layers of which the last has no window; `period` is the default of this number. The number
    0 means windows in all layers. Without `has_window`, no layer has a window.
    """
    key, num_layers = "attention.sliding_window_pattern", keys.whole("block_count")
    if num_layers > _MAX_LAYERS:
        raise keys.error("block_count", f"at most {_MAX_LAYERS}")
    flags: Sequence[float] | None = None
    if isinstance(keys.file.metadata.get(keys.prefix + key), array):
        flags = keys.numbers(key, num_layers)
    else:
        period = keys.whole(key, period)
    slides = flags or [not period or (layer + 1) % period for layer in range(num_layers)]
    return ["sliding_attention" if has_window and each else "full_attention" for each in slides]


def _head_dim(keys: Metadata, hidden_size: int, num_heads: int, *, turns_a_part: bool) -> int:
    if not num_heads:
        raise keys.error("attention.head_count", "a whole number from 1")
    if not keys.has("attention.key_length") and hidden_size % num_heads:
        raise keys.error("embedding_length", f"a multiple of {num_heads} attention heads")
    head_dim = keys.whole("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        may_be_less = turns_a_part and key == "rope.dimension_count"
        if keys.whole(key, head_dim) != head_dim and not (may_be_less and keys.whole(key) < head_dim):
            raise keys.error(key, f"{head_dim}, the length of a key")
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise GgufError(f"{file.path} has no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _dtype(file: GgufFile) -> str:
    """Return the default dtype of the model in a GGUF file. The dtype is float32 or float16 if all weight matrices are
    stored in this type, else bfloat16.
    """
    tensors = {name: info for name, info in file.tensors.items() if not name.endswith(_EXACT)}
    names = {info.type_name for info in tensors.values() if len(info.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(names), "bfloat16")


def _rope(keys: Metadata, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return the config.json settings for the rotary position embeddings of a model in a GGUF file.

    The tensor rope_freqs.weight, which scales each frequency, is not included. It is read with the weights.
    """
    scaling = Metadata(keys.file, f"{keys.prefix}rope.scaling.")
    kind = scaling.text("type", "linear")
    rope: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10_000.0)}
    if beta := keys.number("attention.temperature_scale", 0.0):
        original = scaling.whole("original_context_length", keys.whole("context_length"))
        rope |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    local_theta = keys.number("rope.freq_base_swa", rope["rope_theta"])
    if local_theta != rope["rope_theta"] and "rope_local_base_freq" not in architecture.settings:
        raise keys.error("rope.freq_base_swa", f"{rope['rope_theta']}, the same as rope.freq_base")
    if architecture.turns_a_part:
        rope["partial_rotary_factor"] = keys.whole("rope.dimension_count", head_dim) / head_dim
    if architecture.has_rope_factors and not keys.file.tensors.keys().isdisjoint(ROPE_FACTORS.values()):
        rope |= {"rope_type": "longrope", "attention_factor": scaling.number("attn_factor", 1.0)}
        original = scaling.whole("original_context_length", keys.whole("context_length"))
        return {"original_max_position_embeddings": original, "rope_parameters": rope}
    if kind not in ("none", "linear", "yarn"):
        raise scaling.error("type", "none, linear or yarn")
    factor = scaling.number("factor", keys.number("rope.scale_linear", 1.0))
    if kind != "yarn" and scaling.number("attn_factor", 1.0) != 1.0:
        raise scaling.error("attn_factor", "1.0: no other value is supported")
    if kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "truncate": architecture.rounds_yarn, **_yarn(scaling)}
    return {"rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _yarn(scaling: Metadata) -> dict[str, Any]:
    for key, inert in (("yarn_ext_factor", 1.0), ("attn_factor", 1.0)):
        if scaling.number(key, inert) != inert:
            raise scaling.error(key, f"{inert}: no other value is supported")
    found: dict[str, Any] = {
        name: scaling.number(key)
        for key, name in (
            ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        )
        if scaling.has(key)
    }
    if multiplier := scaling.number("yarn_log_multiplier", 0.0):
        found |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if scaling.has("original_context_length"):
        found["original_max_position_embeddings"] = scaling.whole("original_context_length")
    return found
