"""StarCoder2 (Lozhkov et al., 2024, https://arxiv.org/abs/2402.19173).

It has rotary positions, layer norms, a plain MLP, biases everywhere by default, and the same sliding window, if any, in
all layers.
"""

from collections.abc import Iterator

from pagewire.network.blocks import activation, layer
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.positions import read_equal_windows
from pagewire.network.families.reading import JsonObject, flag
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
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


FAMILY = Family(("Starcoder2ForCausalLM",), _read, defaults={"num_key_value_heads": 2, "tie_word_embeddings": True})
