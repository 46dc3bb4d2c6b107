"""The names of tensors in GGUF files, and the names that checkpoint directories use for the same tensors.

The tables map GGUF names to names in checkpoint directories. A name that ends with ".weight", ".bias" or ".ssm_a" is a
tensor's; other names are modules, which have a weight and perhaps a bias.
"""

import re
from collections.abc import Mapping

_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
# Experts as in DeepSeek-V3.
_GROUPED_EXPERTS = {
    **_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_NET = {
    **_SECOND_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET_MOE = {**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT}
_LFM2 = {
    **{own: usual for own, usual in _LLAMA.items() if own.startswith("attn_")},
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_OF_TENSORS = (".weight", ".bias", ".ssm_a")
# Names outside of layers.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Names within a layer that an architecture has in addition to Llama's, or instead of them.
_PARTS: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    **dict.fromkeys(("olmo2", "exaone4"), _NORMS_AFTER),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe", "olmoe"), _EXPERTS),
    "seed_oss": _SECOND_NORM,
    "gpt-oss": {
        **_SECOND_NORM,
        **_EXPERTS,
        "ffn_gate_inp": "mlp.router",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "qwen2moe": {**_EXPERTS, **_SHARED_EXPERT},
    "qwen35": _DELTA_NET,
    **dict.fromkeys(("qwen35moe", "qwen3next"), _DELTA_NET_MOE),
    "glm4moe": {**_SECOND_NORM, **_GROUPED_EXPERTS},
    "dots1": _GROUPED_EXPERTS,
    "minimax-m2": {**_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
# The names of architectures that are not similar to Llama: the list of layers, names outside of layers, and names in a
# layer.
_OTHERS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "gpt2": (
        "transformer.h",
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
    "mpt": (
        "transformer.blocks",
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
    ),
    **dict.fromkeys(
        ("bloom", "falcon"),
        (
            "transformer.h",
            {
                "token_embd": "transformer.word_embeddings",
                "token_embd_norm": "transformer.word_embeddings_layernorm",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            {**_GPT_NEOX, "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        ),
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2moe"), ("model.layers", {**_OUTSIDE, "token_embd_norm": "model.embedding_norm"}, _LFM2)
    ),
    "gptneox": (
        "gpt_neox.layers",
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        _GPT_NEOX,
    ),
}


class GgufNames:
    """The names of the tensors of one GGUF architecture, in GGUF files and in checkpoint directories."""

    def __init__(self, architecture: str) -> None:
        """Look up the names of an architecture. The default is Llama's names."""
        usual_parts = {**_LLAMA, **_PARTS.get(architecture, {})}
        layers, outside, parts = _OTHERS.get(architecture, ("model.layers", _OUTSIDE, usual_parts))
        inside = {f"blk.{{layer}}.{own}": f"{layers}.{{layer}}.{usual}" for own, usual in parts.items()}
        # If two GGUF names map to the same name, the last one counts.
        self._own = {
            f"{usual}{kind}": f"{own}{kind}"
            for own, usual in {**outside, **inside}.items()
            for kind in (("",) if own.endswith(_OF_TENSORS) else (".weight", ".bias"))
        }
        self._usual = {own: usual for usual, own in self._own.items()}

    def checkpoint_name(self, own_name: str) -> str:
        """Translate the name of a GGUF tensor to its name in checkpoint directories. The name of a tensor that stacks
        the experts of a layer has `{expert}` for the number of the expert. If there is no such name, return the GGUF
        name."""
        return _translated(own_name, self._usual)

    def gguf_name(self, name: str) -> str:
        """Translate a tensor's name in checkpoint directories to its name in the GGUF file."""
        return _translated(re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name), self._own)


def _translated(name: str, names: Mapping[str, str]) -> str:
    """Translate a tensor's name by a table in which `{layer}` is in the place of the number of a layer. Return names
    that the table does not have unchanged."""
    layer = re.search(r"\.(\d+)\.", name)
    if layer is None:
        return names.get(name, name)
    found = names.get(name.replace(layer[0], ".{layer}.", 1))
    return name if found is None else found.replace("{layer}", layer[1])
