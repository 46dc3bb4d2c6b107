"""The names of tensors in GGUF files, and the names that checkpoint directories use for the same tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM = {**_GPT_NEOX, "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}


class GgufNames:
    """The names of the tensors of one GGUF architecture, in GGUF files and in checkpoint directories.

    The mappings are from GGUF names to names in checkpoint directories. A GGUF name with a dot is the name of a tensor;
    other names are modules, which have a weight and perhaps a bias.
    """

    def __init__(
        self,
        parts: Mapping[str, str],
        *,
        embedding: str = "model.embed_tokens",
        norm: str = "model.norm",
        layers: str = "model.layers",
        others: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the names of an architecture.

        Args:
            parts: names within a layer. If two GGUF names map to the same name, the last one counts.
            embedding, norm: the names in checkpoint directories of the token embedding and the last norm.
            layers: the name in checkpoint directories of the list of layers.
            others: further names outside of the layers.
        """
        self._layers = layers
        outside = {"token_embd": embedding, "output_norm": norm, "output": "lm_head", **(others or {})}
        self._outside, self._inside = _Names.of(outside), _Names.of(parts)

    def checkpoint_name(self, own_name: str) -> str:
        """Translate the name of a GGUF tensor to its name in checkpoint directories. The name of a tensor that stacks
        the experts of a layer has `{expert}` for the number of the expert. If there is no such name, return the GGUF
        name."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", own_name)
        if match is None:
            return self._outside.usual.get(own_name, own_name)
        layer, part = match.groups()
        return f"{self._layers}.{layer}.{self._inside.usual[part]}" if part in self._inside.usual else own_name

    def gguf_name(self, name: str) -> str:
        """Translate a tensor's name in checkpoint directories to its name in the GGUF file."""
        match = re.fullmatch(rf"{re.escape(self._layers)}\.(\d+)\.(.+)", name)
        if match is None:
            return self._outside.own[name]
        layer, part = match.groups()
        part = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", part)
        return f"blk.{layer}.{self._inside.own[part]}"


@dataclass(frozen=True, slots=True)
class _Names:
    own: Mapping[str, str]  # the names of tensors in GGUF files, by their names in checkpoint directories
    usual: Mapping[str, str]  # the names in checkpoint directories, by the names in GGUF files

    @staticmethod
    def of(modules: Mapping[str, str]) -> "_Names":
        own: dict[str, str] = {}
        for name, usual in modules.items():
            kinds = ("",) if "." in name else (".weight", ".bias")
            own |= {f"{usual}{kind}": f"{name}{kind}" for kind in kinds}
        return _Names(own, {name: usual for usual, name in own.items()})


def names_of(architecture: str) -> GgufNames:
    """Return the names of the tensors of a GGUF architecture. The default is Llama's names."""
    return _BY_ARCHITECTURE.get(architecture) or GgufNames({**_LLAMA, **_PARTS.get(architecture, {})})


# Names within a layer that an architecture has in addition to Llama's, or instead of them.
_PARTS: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    **dict.fromkeys(("olmo2", "exaone4"), _NORMS_BEHIND),
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
    "qwen2moe": {
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    # The last layers are for multi-token prediction, which is not supported; these tensors are ignored.
    "glm4moe": {
        **_SECOND_NORM,
        **_GROUPED_EXPERTS,
        **{f"nextn.{part}.weight": f"{part}.weight" for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
        **{f"nextn.shared_head_{part}.weight": f"shared_head.{part}.weight" for part in ("head", "norm")},
    },
    "dots1": _GROUPED_EXPERTS,
    "minimax-m2": {**_MIXTRAL, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_BY_ARCHITECTURE = {
    "gpt2": GgufNames(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        embedding="transformer.wte",
        norm="transformer.ln_f",
        layers="transformer.h",
        others={"position_embd": "transformer.wpe"},
    ),
    "mpt": GgufNames(
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        embedding="transformer.wte",
        norm="transformer.norm_f",
        layers="transformer.blocks",
    ),
    "bloom": GgufNames(
        _BLOOM,
        embedding="transformer.word_embeddings",
        norm="transformer.ln_f",
        layers="transformer.h",
        others={"token_embd_norm": "transformer.word_embeddings_layernorm"},
    ),
    "falcon": GgufNames(
        _BLOOM, embedding="transformer.word_embeddings", norm="transformer.ln_f", layers="transformer.h"
    ),
    "gptneox": GgufNames(
        _GPT_NEOX,
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        layers="gpt_neox.layers",
        others={"output": "embed_out"},
    ),
}
