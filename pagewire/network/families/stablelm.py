"""StableLM (Bellagente et al., 2024, https://arxiv.org/abs/2402.17834).

It has layer norms and Llama's gated MLP. A part of each head is rotated. In some models, attention and the MLP run in
parallel on the layer's normalized input.
"""

from collections.abc import Iterator

from pagewire.network.blocks import layer, parallel_layer
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.positions import read_rope
from pagewire.network.families.reading import JsonObject, expect, flag
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    expect(config, "qk_layernorm", False)
    ropes = read_rope(config, default_share=0.25)
    text = TextConfig.read(config, architecture, ropes=ropes, eps_key="layer_norm_eps", default_eps=1e-5)
    norm, mlp, has_bias = text.norm(is_centered=True, has_bias=True), text.mlp(), flag(config, "use_qkv_bias", False)
    is_parallel = flag(config, "use_parallel_residual", False)

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention, norms = text.attention(at, qkv_bias=has_bias)(f"{name}.self_attn"), norms_of(name)
        if is_parallel:
            yield from parallel_layer(norm, norms[0], attention, mlp(f"{name}.mlp", target="mlp_update"))
        else:
            yield from layer(norm, norms, attention, mlp(f"{name}.mlp"))

    return text.model(norm, layers)


FAMILY = Family(("StableLmForCausalLM",), _read, defaults={"num_key_value_heads": 32})
