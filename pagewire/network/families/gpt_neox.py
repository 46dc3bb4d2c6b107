"""GPT-NeoX (Black et al., 2022, https://arxiv.org/abs/2204.06745) with Pythia, StarCoder2 (Lozhkov et al., 2024,
https://arxiv.org/abs/2402.19173), and StableLM (Bellagente et al., 2024, https://arxiv.org/abs/2402.17834).

All have rotary positions and layer norms. In GPT-NeoX and some StableLM models, attention and the MLP run in parallel,
and a part of each head is rotated. GPT-NeoX stores queries, keys and values as one projection, head by head. It and
StarCoder2 have a plain MLP, and biases everywhere by default. StarCoder2 has the same sliding window, if any, in all
layers. StableLM has Llama's gated MLP. StableLM 2 12B has a layer norm for each head of queries and keys.
"""

from collections.abc import Iterator

from pagewire.network.blocks import activation, embed, layer, lm_head, parallel_layer
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, head_dim_of, norms_of
from pagewire.network.families.positions import (
    read_equal_windows,
    read_partial_rotary_factor,
    read_rope,
    rope_settings,
)
from pagewire.network.families.reading import JsonObject, attention_biases, flag, unserved
from pagewire.network.network import Network
from pagewire.network.operations import Add, Operation


def _read_gpt_neox(config: JsonObject, architecture: str) -> Network:
    default_theta = config.get("rotary_emb_base") or 10_000.0
    settings = rope_settings(config, default_theta, config.get("rotary_pct", 0.25))
    share = read_partial_rotary_factor(config, settings, "rotary_pct", 0.25)
    plain = {**config, "num_key_value_heads": None, "head_dim": None}  # settings that the model does not have
    if config.get("head_dim") not in (None, head_dim_of(plain)):
        raise unserved("head_dim", config["head_dim"], f"unset for {architecture}, or {head_dim_of(plain)}")
    text = TextConfig.read(
        plain,
        architecture,
        ropes=read_rope(config, default_theta=default_theta, default_share=share),
        eps_key="layer_norm_eps",
        default_eps=1e-5,
        activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu"),
    )
    return text.network(_gpt_neox(text))


def _gpt_neox(text: TextConfig) -> Iterator[Operation]:
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=True)
    is_parallel, biases = flag(text.config, "use_parallel_residual", True), attention_biases(text.config, True)
    yield embed("gpt_neox.embed_in", text.vocab_size, text.hidden_size)
    for at in range(text.num_layers):
        name = f"gpt_neox.layers.{at}"
        attend = text.attention(at, **biases)
        attention = attend(f"{name}.attention", ("query_key_value",), "dense", are_by_head=True)
        multiply = mlp(
            f"{name}.mlp", ("dense_h_to_4h",), "dense_4h_to_h", target="mlp_update" if is_parallel else "update"
        )
        if is_parallel:
            yield norm(f"{name}.input_layernorm")
            yield from attention
            yield norm(f"{name}.post_attention_layernorm")
            yield from multiply
            yield Add("x", "update")
            yield Add("x", "mlp_update")
        else:
            yield from layer(norm, norms_of(name), attention, multiply)
    yield norm("gpt_neox.final_layer_norm")
    yield lm_head("embed_out", text.hidden_size, text.vocab_size)


def _read_starcoder2(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(
        config,
        architecture,
        windows=read_equal_windows(config, default_window=None),
        eps_key="norm_epsilon",
        default_eps=1e-5,
        activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
    )
    has_bias = flag(config, "use_bias", True)
    norm = text.norm(is_centered=True, has_bias=True)
    mlp = text.mlp(activation=activation(text.activation, is_gated=False), has_bias=has_bias)

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at, qkv_bias=has_bias, output_bias=has_bias)(f"{name}.self_attn")
        yield from layer(norm, norms_of(name), attention, mlp(f"{name}.mlp", up=("c_fc",), down="c_proj"))

    return text.model(norm, layers)


def _read_stablelm(config: JsonObject, architecture: str) -> Network:
    ropes = read_rope(config, default_share=0.25)
    text = TextConfig.read(config, architecture, ropes=ropes, eps_key="layer_norm_eps", default_eps=1e-5)
    norm, mlp, has_bias = text.norm(is_centered=True, has_bias=True), text.mlp(), flag(config, "use_qkv_bias", False)
    is_parallel = flag(config, "use_parallel_residual", False)
    qk_norm = "layer_norm" if flag(config, "qk_layernorm", False) else "none"

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at, qkv_bias=has_bias, qk_norm=qk_norm)(f"{name}.self_attn")
        norms = norms_of(name)
        if is_parallel:
            yield from parallel_layer(norm, norms[0], attention, mlp(f"{name}.mlp", target="mlp_update"))
        else:
            yield from layer(norm, norms, attention, mlp(f"{name}.mlp"))

    return text.model(norm, layers)


# Old checkpoints store the causal mask of every layer.
GPT_NEOX = Family(
    ("GPTNeoXForCausalLM",), _read_gpt_neox, ignored=r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$"
)
STARCODER2 = Family(
    ("Starcoder2ForCausalLM",), _read_starcoder2, defaults={"num_key_value_heads": 2, "tie_word_embeddings": True}
)
# Each head's norm is a tensor of its own.
_STABLELM_NAMES = ((r"\.([qk])_norm\.weight$", r".\1_layernorm.norms.{head}.weight"),)
STABLELM = Family(
    ("StableLmForCausalLM",),
    _read_stablelm,
    defaults={"num_key_value_heads": 32},
    renamings=(_STABLELM_NAMES, (*_STABLELM_NAMES, *WITHOUT_PREFIX)),
)
