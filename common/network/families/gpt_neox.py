"""GPT-NeoX (Black et al., 2022, https://arxiv.org/abs/2204.06745) and Pythia.

Attention and MLP read the same, a part of each head is turned, and queries, keys and values are one product, head by
head.
"""

from pagewire.common.network.config import JsonObject, ModelConfig
from pagewire.common.network.families.family import OURS, Family, Split, Weight, head_dim_of, read_decoder
from pagewire.common.network.families.positions import read_rope, read_share, rope_settings
from pagewire.common.network.families.reading import attention_biases, flag, unserved

_LAYER = "gpt_neox.layers.{layer}"
_WEIGHTS = (
    Weight("gpt_neox.embed_in", "embedding"),
    Weight(f"{_LAYER}.input_layernorm", f"{OURS}.attention_norm"),
    Weight(f"{_LAYER}.attention.query_key_value", f"{OURS}.attention.qkv", split=(Split.QKV_BY_HEAD,)),
    Weight(f"{_LAYER}.attention.dense", f"{OURS}.attention.output", split=Split.HEADS, axis=1),
    Weight(f"{_LAYER}.post_attention_layernorm", f"{OURS}.mlp_norm"),
    Weight(f"{_LAYER}.mlp.dense_h_to_4h", f"{OURS}.mlp.up", split=Split.INTERMEDIATE),
    Weight(f"{_LAYER}.mlp.dense_4h_to_h", f"{OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1),
    Weight("gpt_neox.final_layer_norm", "norm"),
    Weight("embed_out", "head", split=Split.VOCABULARY),
)


def _read(config: JsonObject, architecture: str) -> ModelConfig:
    default_theta = config.get("rotary_emb_base") or 10_000.0
    settings = rope_settings(config, default_theta, config.get("rotary_pct", 0.25))
    share = read_share(config, settings, "rotary_pct", 0.25)
    ropes = read_rope(config, default_theta=default_theta, default_share=share)
    plain = {**config, "num_key_value_heads": None, "head_dim": None}  # which the model does not have
    if config.get("head_dim") not in (None, head_dim_of(plain)):
        raise unserved("head_dim", config["head_dim"], f"unset for {architecture}, or {head_dim_of(plain)}")
    return read_decoder(
        plain,
        architecture,
        ropes=ropes,
        eps_key="layer_norm_eps",
        default_eps=1e-5,
        activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu"),
        norm="layer",
        norm_bias=True,
        is_parallel=flag(config, "use_parallel_residual", True),
        is_gated=False,
        qkv_by_head=True,
        **attention_biases(config, True),
        mlp_bias=True,
    )


# Old checkpoints carry the causal mask of every layer.
FAMILY = Family(
    ("GPTNeoXForCausalLM",), _read, _WEIGHTS, ignored=r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$"
)
