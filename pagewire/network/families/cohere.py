"""Command R (Cohere, 2024, https://docs.cohere.com/docs/command-r), and Command R7B and A (2025,
https://arxiv.org/abs/2504.00698).

Attention and the MLP run in parallel on the layer's normalized input. Norms are layer norms without biases. Heads are
rotated in pairs of neighbours. Command R+ has a layer norm for each head of queries and keys. In Command R7B and A,
three layers of four have a sliding window, and the fourth has no positions.
"""

from collections.abc import Iterator

from pagewire.network.blocks import parallel_layer
from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.positions import FULL, SLIDING, Ropes, read_rope, read_windows
from pagewire.network.families.reading import (
    JsonObject,
    attention_biases,
    flag,
    num_layers_of,
    number,
    positive,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    ropes = read_rope(config, default_theta=500_000.0, is_interleaved=True)
    return _model(config, architecture, ropes, None, has_qk_norm=flag(config, "use_qk_norm", False))


def _read_cohere2(config: JsonObject, architecture: str) -> Network:
    interval = positive(config, "sliding_window_pattern", 4)
    kinds = [SLIDING if (layer + 1) % interval else FULL for layer in range(num_layers_of(config))]
    _, windows = read_windows(config, kinds)
    ropes, num_positions = read_rope(config, is_interleaved=True)
    with_window = tuple(rope if window else None for rope, window in zip(ropes, windows, strict=True))
    return _model(config, architecture, (with_window, num_positions), windows)


def _model(
    config: JsonObject, architecture: str, ropes: Ropes, windows: tuple[int, ...] | None, *, has_qk_norm: bool = False
) -> Network:
    text = TextConfig.read(
        config, architecture, ropes=ropes, windows=windows, eps_key="layer_norm_eps", default_eps=1e-5
    )
    norm, mlp = text.norm(is_centered=True), text.mlp()
    how = {**attention_biases(config), "qk_norm": "layer_norm" if has_qk_norm else "none"}

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at, **how)(f"{name}.self_attn")
        yield from parallel_layer(norm, f"{name}.input_layernorm", attention, mlp(f"{name}.mlp", target="mlp_update"))

    return text.model(norm, layers, logits_factor=number(config, "logit_scale", 0.0625))


COHERE = Family(("CohereForCausalLM",), _read, defaults={"tie_word_embeddings": True})
COHERE2 = Family(("Cohere2ForCausalLM",), _read_cohere2, defaults={"tie_word_embeddings": True})
