"""StableLM (Bellagente et al., 2024, https://arxiv.org/abs/2402.17834).

It has layer norms and Llama's gated MLP. A part of each head is rotated. In some models, attention and the MLP run in
parallel on the layer's normalized input. StableLM 2 12B has a layer norm for each head of queries and keys.
"""

from collections.abc import Iterator

from pagewire.network.blocks import layer, parallel_layer
from pagewire.network.families.family import WITHOUT_PREFIX, Family, TextConfig, norms_of
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import JsonObject, flag
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
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


# Each head's norm is a tensor of its own.
_NAMES = ((r"\.([qk])_norm\.weight$", r".\1_layernorm.norms.{head}.weight"),)
FAMILY = Family(
    ("StableLmForCausalLM",),
    _read,
    defaults={"num_key_value_heads": 32},
    renamings=(_NAMES, (*_NAMES, *WITHOUT_PREFIX)),
)
