"""Writes checkpoints as GGUF files with PyPI `gguf`, in the same form as llama.cpp's converter."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

_ARCH = gguf.MODEL_ARCH
ARCHITECTURES = {
    "LlamaForCausalLM": _ARCH.LLAMA,
    "MistralForCausalLM": _ARCH.LLAMA,
    "MixtralForCausalLM": _ARCH.LLAMA,
    "Ministral3ForCausalLM": _ARCH.MISTRAL3,
    "GraniteForCausalLM": _ARCH.GRANITE,
    "GraniteMoeHybridForCausalLM": _ARCH.GRANITE,
    "SmolLM3ForCausalLM": _ARCH.SMOLLM3,
    "ArceeForCausalLM": _ARCH.ARCEE,
    "Ernie4_5ForCausalLM": _ARCH.ERNIE4_5,
    "SeedOssForCausalLM": _ARCH.SEED_OSS,
    "Qwen2ForCausalLM": _ARCH.QWEN2,
    "Qwen2MoeForCausalLM": _ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": _ARCH.QWEN3,
    "Qwen3MoeForCausalLM": _ARCH.QWEN3MOE,
    "GemmaForCausalLM": _ARCH.GEMMA,
    "Gemma2ForCausalLM": _ARCH.GEMMA2,
    "Gemma3ForCausalLM": _ARCH.GEMMA3,
    "Phi3ForCausalLM": _ARCH.PHI3,
    "GptOssForCausalLM": _ARCH.GPT_OSS,
    "OlmoForCausalLM": _ARCH.OLMO,
    "Olmo2ForCausalLM": _ARCH.OLMO2,
    "Olmo3ForCausalLM": _ARCH.OLMO2,
    "OlmoeForCausalLM": _ARCH.OLMOE,
    "Exaone4ForCausalLM": _ARCH.EXAONE4,
    "GlmForCausalLM": _ARCH.CHATGLM,
    "Glm4ForCausalLM": _ARCH.GLM4,
    "Glm4MoeForCausalLM": _ARCH.GLM4_MOE,
    "Dots1ForCausalLM": _ARCH.DOTS1,
    "MiniMaxM2ForCausalLM": _ARCH.MINIMAXM2,
    "CohereForCausalLM": _ARCH.COMMAND_R,
    "Cohere2ForCausalLM": _ARCH.COHERE2,
    "StableLmForCausalLM": _ARCH.STABLELM,
    "Starcoder2ForCausalLM": _ARCH.STARCODER2,
    "FalconForCausalLM": _ARCH.FALCON,
    "GPTNeoXForCausalLM": _ARCH.GPTNEOX,
    "GPT2LMHeadModel": _ARCH.GPT2,
    "BloomForCausalLM": _ARCH.BLOOM,
    "MptForCausalLM": _ARCH.MPT,
    "Lfm2ForCausalLM": _ARCH.LFM2,
    "Lfm2MoeForCausalLM": _ARCH.LFM2MOE,
    "Qwen3_5ForCausalLM": _ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": _ARCH.QWEN35MOE,
    "Qwen3NextForCausalLM": _ARCH.QWEN3NEXT,
}
_LFM2 = (_ARCH.LFM2, _ARCH.LFM2MOE)
_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")  # files of LFM2 lack these keys
_QWEN35 = (_ARCH.QWEN35, _ARCH.QWEN35MOE)
_DELTA_NETS = (*_QWEN35, _ARCH.QWEN3NEXT)
# Files of these architectures pair neighbours in the rows of queries and keys.
_PERMUTED = (_ARCH.LLAMA, _ARCH.MISTRAL3, _ARCH.GRANITE, _ARCH.SMOLLM3, _ARCH.ARCEE, _ARCH.OLMO)
# Settings of config.json by their keys in GGUF files, for all files whose config.json has one of them.
_KEYS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
}
_EXPERTS_OF_DEEPSEEK = (_ARCH.GLM4_MOE, _ARCH.DOTS1)
_WINDOWED = (
    *(_ARCH.LLAMA, _ARCH.GEMMA2, _ARCH.GEMMA3, _ARCH.PHI3, _ARCH.GPT_OSS),
    *(_ARCH.OLMO2, _ARCH.EXAONE4, _ARCH.COHERE2),
)
# Keys that the converter writes for some architectures only, with their names in config.json.
_SOME_KEYS = (
    (
        "expert_feed_forward_length",
        "moe_intermediate_size",
        (_ARCH.QWEN3MOE, _ARCH.QWEN2MOE, _ARCH.LFM2MOE, _ARCH.QWEN35MOE, _ARCH.QWEN3NEXT, *_EXPERTS_OF_DEEPSEEK),
    ),
    ("expert_feed_forward_length", "intermediate_size", (_ARCH.GPT_OSS, _ARCH.MINIMAXM2)),
    ("expert_weights_scale", "routed_scaling_factor", _EXPERTS_OF_DEEPSEEK),
    ("expert_weights_norm", "norm_topk_prob", _EXPERTS_OF_DEEPSEEK),
    ("attention.sliding_window", "sliding_window", _WINDOWED),
)
# Files of these architectures store 1 + w for norms.
_ADD_ONE = (_ARCH.GEMMA, _ARCH.GEMMA2, _ARCH.GEMMA3, *_DELTA_NETS)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Types that PyPI `gguf` can read but not write: the bytes of a block, its number of weights, and the places of its
# float16 scale and minimum.
_READ_ONLY = {
    "Q2_K": (84, 256, 80, 82),
    "Q3_K": (110, 256, 108, None),
    "Q4_K": (144, 256, 0, 2),
    "Q5_K": (176, 256, 0, 2),
    "Q6_K": (210, 256, 208, None),
    "IQ4_NL": (18, 32, 0, None),
    "IQ4_XS": (136, 256, 0, None),
    "IQ3_S": (110, 256, 0, None),
    "IQ3_XXS": (98, 256, 0, None),
    "IQ2_S": (82, 256, 0, None),
    "IQ2_XS": (74, 256, 0, None),
    "IQ2_XXS": (66, 256, 0, None),
    "IQ1_S": (50, 256, 0, None),
    "IQ1_M": (56, 256, None, None),  # four bits of the scale in each of the last four 16-bit words
}
# The standard deviation of a weight of random bytes if the scale is 1; with minimums, they are in the middle.
_SPREADS = {
    **{"Q2_K": 15, "Q3_K": 42, "Q4_K": 150, "Q5_K": 310, "Q6_K": 1332, "IQ4_NL": 67, "IQ4_XS": 1230},
    **{"IQ3_S": 139, "IQ3_XXS": 141, "IQ2_S": 56, "IQ2_XS": 56, "IQ2_XXS": 53, "IQ1_S": 7.3, "IQ1_M": 7.3},
}
_LARGEST = {"Q2_K": 3, "Q4_K": 15, "Q5_K": 31}  # codes of the types with minimums


def write_gguf(
    path: Path,
    checkpoint: Path,
    type_name: str,
    *,
    types: Mapping[str, str] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    replaced: Mapping[str, Any] | None = None,
    arch: gguf.MODEL_ARCH | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """Write a checkpoint's model and tokenizer to the GGUF file `path` and return the path. With `tensors_per_part`,
    write several files, and return the path of the first.

    Args:
        checkpoint: the checkpoint directory.
        type_name: the element type of matrices; vectors are F32.
        types: the element types of some matrices, by the suffixes of their names.
        tokenizer: keys of `tokenizer.ggml.`; by default they are derived from tokenizer.json.
        settings: further keys and values; None removes a key.
        replaced: tensors by name, each with its type, in place of the checkpoint's tensors.
        arch: the architecture to name; by default the one that belongs to the checkpoint's.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    usual = ARCHITECTURES[config["architectures"][0]]
    name = gguf.MODEL_ARCH_NAMES[arch or usual]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_per_part)
    found = {f"{name}.{key}": value for key, value in _settings(usual, config).items()}
    found |= {"general.type": "model", "general.file_type": 1, **_tokenizer_keys(checkpoint, config, tokenizer)}
    for key, value in {**found, **(settings or {})}.items():
        if value is not None:
            _add(writer, key, value)
    for own_name, tensor in own_tensors(checkpoint, config).items():
        if replaced and own_name in replaced:
            continue
        own_type = next((kind for ending, kind in (types or {}).items() if own_name.endswith(ending)), type_name)
        add_tensor(writer, own_name, tensor, "F32" if tensor.dim() == 1 or own_name.endswith(_EXACT) else own_type)
    for own_name, (tensor, own_type) in {**_rope_factors(config), **(replaced or {})}.items():
        add_tensor(writer, own_name, tensor, own_type)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        finish()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_part else path


# Tensors that the converter writes in float32.
_EXACT = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight", ".bias"),
    *(".ssm_conv1d.weight", ".shortconv.conv.weight"),
)


def own_tensors(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint as llama.cpp's converter writes them, by their names in GGUF files."""
    arch = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(arch, _first(config, "num_hidden_layers", "n_layer", "n_layers"))
    found = {}
    tensors = _stacked(_apart(load_file(checkpoint / "model.safetensors")))
    if arch in _DELTA_NETS:
        tensors = _delta_nets(arch, config, tensors)
    for name, tensor in tensors.items():
        if arch in (_ARCH.BLOOM, _ARCH.GPT2):
            name = name.removeprefix("transformer.")
        if arch is _ARCH.LFM2MOE and ".experts." in name:
            name = name.removeprefix("model.")
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) and arch is _ARCH.GPT2:
            tensor = tensor.t()
        if ".query_key_value." in name and arch in (_ARCH.BLOOM, _ARCH.GPTNEOX):
            heads = _first(config, "num_attention_heads", "n_head")
            tensor = tensor.unflatten(0, (heads, 3, -1)).swapaxes(0, 1).reshape(tensor.shape)
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        if arch in _PERMUTED and (".attn_q." in own_name or ".attn_k." in own_name):
            tensor = permuted(
                tensor, config["num_attention_heads" if ".attn_q." in own_name else "num_key_value_heads"]
            )
        if arch in _ADD_ONE and own_name.endswith("_norm.weight") and ".ssm_" not in own_name:
            tensor = tensor.float() + 1
        found[own_name] = tensor.squeeze(1) if own_name.endswith(_CONVOLUTIONS) else tensor
    return found


def _delta_nets(
    arch: gguf.MODEL_ARCH, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with gated delta nets as in llama.cpp's converter: Qwen3-Next's are separated, and
    the value heads of Qwen3.5 are in another order."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim, repeats = config["linear_key_head_dim"], config["linear_value_head_dim"], num_values // num_keys
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            tensor = -tensor.float().exp()
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if ".in_proj_qkvz." in name:
            sizes = [key_dim, key_dim, repeats * value_dim, repeats * value_dim]
            *qkv, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (num_keys, -1)).split(sizes, 1))
            found |= {name.replace("qkvz", "qkv"): torch.cat(qkv), name.replace("qkvz", "z"): z}
            continue
        kind = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
        if arch in _QWEN35 and kind in ("in_proj_qkv", "conv1d"):
            keys, values = tensor.split([2 * num_keys * key_dim, num_values * value_dim])
            tensor = torch.cat([keys, tiled(values, num_keys, repeats)])
        elif arch in _QWEN35 and kind in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_proj.bias"):
            tensor = tiled(tensor, num_keys, repeats)
        elif arch in _QWEN35 and kind == "out_proj":
            tensor = tiled(tensor.t(), num_keys, repeats).t()
        found[name] = tensor
    return found


def tiled(rows: torch.Tensor, num_key_heads: int, repeats: int) -> torch.Tensor:
    """Reorder rows of value heads, so that the heads of one key head are no longer adjacent: head h belongs to key head
    h % num_key_heads."""
    return rows.unflatten(0, (num_key_heads, repeats, -1)).swapaxes(0, 1).flatten(0, 2)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the first of the named settings that a config.json has, or None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the tensors of all experts stacked, as in llama.cpp's converter."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
    return found | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


_OF_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")  # gpt-oss
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _parts(match: re.Match[str]) -> list[str]:
    """Return the names that llama.cpp's converter gives to the projections that gpt-oss interleaves in one tensor."""
    return [f"{match[1]}.{projection}.{'bias' if match[3] else 'weight'}" for projection in _PROJECTIONS[match[2]]]


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the stacked projections of gpt-oss separated, each [experts, outputs, inputs], and with
    the shared MLP of Granite 4 separated, as in llama.cpp's converter."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".shared_mlp.input_linear." in name:
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
            found |= {name.replace("shared_mlp.input_linear", f"mlp.{part}"): half for part, half in parts}
            continue
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        match = _OF_ALL_EXPERTS.fullmatch(name)
        if match is None:
            found[f"{name}.weight" if name.endswith(".sinks") else name] = tensor
            continue
        parts, outputs_first = _parts(match), tensor if match[3] else tensor.swapaxes(1, 2)
        found |= {part: outputs_first[:, number :: len(parts)] for number, part in enumerate(parts)}
    return found


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Interleave the projections again that `_apart` has separated."""
    stacked = torch.stack(parts, dim=2).flatten(1, 2)
    return stacked if stacked.dim() == 2 else stacked.swapaxes(1, 2)


def permuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head from two halves to neighbouring pairs, as llama.cpp's converter does for
    "llama"."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, type_name: str) -> None:
    """Quantise a tensor to the given type and add it to the file."""
    qtype = GGMLQuantizationType[type_name]
    if type_name in _READ_ONLY:
        writer.add_tensor(name, random_blocks(tensor, type_name), raw_dtype=qtype)
        return
    values = tensor.float().contiguous().numpy()
    writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)


def random_blocks(tensor: torch.Tensor, type_name: str) -> np.ndarray:
    """Return random blocks of a type that PyPI `gguf` can read but not write. The weights have about the size of the
    tensor's, and the random seed is derived from the tensor."""
    seed = int(tensor.float().abs().sum().item() * 1000) % (1 << 32)
    rng = np.random.default_rng(seed)
    num_bytes, size, scale_place, minimum_place = _READ_ONLY[type_name]
    rows, num_blocks = tensor.shape[:-1].numel(), tensor.shape[-1] // size
    blocks = rng.integers(0, 256, (rows, num_blocks, num_bytes), dtype=np.uint8)
    scale = tensor.float().std().item() / _SPREADS[type_name]
    half = np.array([scale], np.float16)
    if scale_place is None:
        words = blocks[..., -8:].view(np.uint16)
        words[:] = words & 0x0FFF | (half.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
    else:
        blocks[..., scale_place : scale_place + 2] = half.view(np.uint8)
    if minimum_place is not None:
        # Place the minimums in the middle of the codes, so that weights have both signs.
        minimum = np.array([scale * _LARGEST[type_name] / 2], np.float16)
        blocks[..., minimum_place : minimum_place + 2] = minimum.view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def requantized(source: Path, path: Path, type_name: str) -> Path:
    """Write a copy of a GGUF file with its matrices in another type. As in llama.cpp's files, the embedding keeps at
    least 8 bits. Returns `path`."""
    write_tensors(source, path, dequantized(source), type_name)
    return path


def write_tensors(source: Path, path: Path, tensors: Mapping[str, np.ndarray], type_name: str) -> None:
    """Write a copy of a GGUF file with other values, float32. For the types see `requantized`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *of_items = found.types
            writer.add_key_value(key, found.contents(), kind, of_items[-1] if of_items else None)
    for name, values in tensors.items():
        own_type = "Q8_0" if name == "token_embd.weight" and type_name != "F32" else type_name
        add_tensor(writer, name, torch.from_numpy(values.copy()), own_type if values.ndim > 1 else "F32")
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        finish()
    writer.close()


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """Return the float32 values that PyPI `gguf` reads from every tensor, by the file's own names."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }


def _settings(arch: gguf.MODEL_ARCH, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a GGUF file that llama.cpp's converter derives from a config.json, without the architecture's
    prefix."""
    attention = config.get("attn_config") or {}
    config = {**config, "clip_qkv": config.get("clip_qkv", attention.get("clip_qkv"))}
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    head_dim = config.get("head_dim") or width // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    share = rope.get("partial_rotary_factor", config.get("rotary_dim", head_dim) / head_dim)
    found = {
        "block_count": _first(config, "num_hidden_layers", "n_layer", "n_layers"),
        "context_length": _first(config, "max_position_embeddings", "n_positions", "max_seq_len") or 2048,
        "embedding_length": width,
        "feed_forward_length": _first(config, "intermediate_size", "n_inner") or 4 * width,
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if arch is _ARCH.FALCON else config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * share),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        "attention.max_alibi_bias": float(attention["alibi_bias_max"]) if attention else None,
        "attention.layer_norm_epsilon": 1e-5 if arch in (_ARCH.OLMO, _ARCH.MPT) else None,
    }
    found |= {key: value for key, names in _KEYS.items() if (value := _first(config, *names)) is not None}
    found |= {key: config.get(name) for key, name, archs in _SOME_KEYS if arch in archs}
    if config.get("num_local_experts") == 0:  # Granite 4
        found |= {"attention.head_count_kv": [config["num_key_value_heads"]] * found["block_count"]}
        found |= {"expert_shared_feed_forward_length": found["feed_forward_length"], "rope.scaling.finetuned": True}
    if arch in (_ARCH.DOTS1, _ARCH.MINIMAXM2, _ARCH.GLM4_MOE, _ARCH.LFM2MOE):
        found["expert_gating_func"] = gguf.ExpertGatingFuncType.SIGMOID.value
    if arch is _ARCH.GLM4_MOE:
        found["nextn_predict_layers"] = 1
        found["block_count"] += 1
    if arch in (_ARCH.OLMO2, _ARCH.EXAONE4) and found["attention.sliding_window"]:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    found |= _of_states(arch, config)
    if arch is _ARCH.GEMMA3:
        local = config["rope_parameters"].get("sliding_attention", {})
        found["rope.freq_base_swa"] = float(local.get("rope_theta", 10_000.0))
        found["attention.sliding_window_pattern"] = config["layer_types"].index("full_attention") + 1
    return found | _scaling(arch, config, rope)


def _of_states(arch: gguf.MODEL_ARCH, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file that say which layers of a model have a state instead of K and V."""
    if arch in _LFM2:
        num_heads = config["num_key_value_heads"]
        heads = [num_heads * (kind == "full_attention") for kind in config["layer_types"]]
        return {"attention.head_count_kv": heads, **dict.fromkeys(_LENGTHS)}
    if arch not in _DELTA_NETS:
        return {}
    return {
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": 4,
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "rope.dimension_sections": [11, 11, 10, 0] if arch in _QWEN35 else None,
        "feed_forward_length": config.get("intermediate_size"),
    }


def _scaling(arch: gguf.MODEL_ARCH, config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    found: dict[str, Any] = {}
    if kind == "longrope":
        factor = _attention_factor(rope, config["max_position_embeddings"])
        found |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": factor}
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = original
    if arch is _ARCH.MISTRAL3:
        found["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
        found["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    return found


def _attention_factor(rope: Mapping[str, Any], num_positions: int) -> float:
    """Return the attention factor of LongRoPE as llama.cpp's converter computes it."""
    original = rope["original_max_position_embeddings"]
    scale = num_positions / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _rope_factors(config: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, str]]:
    rope = config.get("rope_parameters") or {}
    kinds = ("long", "short") if rope.get("rope_type") == "longrope" else ()
    return {f"rope_factors_{kind}.weight": (torch.tensor(rope[f"{kind}_factor"]), "F32") for kind in kinds}


def _tokenizer_keys(checkpoint: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> dict[str, Any]:
    if tokenizer is None:
        path = checkpoint / "tokenizer.json"
        if path.is_file():
            tokenizer = byte_level_keys(json.loads(path.read_text()), config["vocab_size"])
        else:
            tokens = ["a", "b", "ab", *(f"<{token}>" for token in range(3, config["vocab_size"]))]
            tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"]}
    found = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    end = config.get("eos_token_id")
    if isinstance(end, int):
        found["tokenizer.ggml.eos_token_id"] = end
    described = checkpoint / "tokenizer_config.json"
    if described.is_file():
        found["tokenizer.chat_template"] = json.loads(described.read_text()).get("chat_template")
    return found


def byte_level_keys(tokenizer: Mapping[str, Any], vocab_size: int, pre: str = "gpt-2") -> dict[str, Any]:
    """Return the GGUF keys for a tokenizer.json with byte-level BPE."""
    by_id = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, NORMAL)
    for added in tokenizer["added_tokens"]:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = tokenizer["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)],
        "token_type": [types.get(token_id, UNUSED) for token_id in range(vocab_size)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def write_dequantized(directory: Path, path: Path, checkpoint: Path) -> Path:
    """Write the checkpoint from which a GGUF file was made, with the float32 weights that PyPI `gguf` reads from the
    file. Returns `directory`."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    values, weights = dequantized(path), {}
    for name in load_file(checkpoint / "model.safetensors"):
        of_all = _OF_ALL_EXPERTS.fullmatch(name)
        if of_all is not None:
            own_names = [names.get_name(part, try_suffixes=(".weight", ".bias")) for part in _parts(of_all)]
            weights[name] = _together([torch.from_numpy(values[own].copy()) for own in own_names]).contiguous()
            continue
        match = _OF_EXPERT.fullmatch(name)
        own_name = names.get_name(match[1] + match[3] if match else name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None, name
        own_name += ".weight" * name.endswith(".sinks")
        tensor = torch.from_numpy(values[own_name][int(match[2])].copy() if match else values[own_name].copy())
        if arch is gguf.MODEL_ARCH.LLAMA and (".attn_q." in own_name or ".attn_k." in own_name):
            heads = config["num_attention_heads" if ".attn_q." in own_name else "num_key_value_heads"]
            # The inverse permutation, as in transformers.
            tensor = tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(2, 1).reshape(tensor.shape)
        if arch in _ADD_ONE and own_name.endswith("_norm.weight"):
            tensor = tensor - 1
        weights[name] = tensor.contiguous()
    directory.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".json":
            (directory / file.name).write_bytes(file.read_bytes())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    save_file(weights, directory / "model.safetensors")
    return directory
