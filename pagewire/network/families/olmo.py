"""OLMo (OLMo team, 2024, https://arxiv.org/abs/2402.00838), OLMo 2 (2024, https://arxiv.org/abs/2501.00656) and OLMo 3
(2025, https://arxiv.org/abs/2512.13961).

OLMo is a Llama whose norms are layer norms without weights. OLMo 2 and 3 have norms after attention and the MLP instead
of before them. One norm covers the queries of all heads, and another covers the keys of all heads. In OLMo 3, three
layers of four have a sliding window, and rope scaling applies only to the fourth.

OLMoE (2024, https://arxiv.org/abs/2409.02060) has norms before attention and the MLP, the same norms of queries and
keys, and experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pagewire.network.blocks import add_update, layer
from pagewire.network.families.family import Family, TextConfig, norms_of
from pagewire.network.families.positions import FULL, SLIDING, Ropes, read_ropes_by_kind, read_windows
from pagewire.network.families.reading import JsonObject, attention_biases, flag, num_layers_of, number
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read_olmo(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read({**config, "rms_norm_eps": None}, architecture, default_eps=1e-5)
    norm, mlp, how = text.norm(is_centered=True, has_weight=False), text.mlp(), _attention_of(config)

    def layers(at: int, name: str) -> Iterator[Operation]:
        yield from layer(norm, norms_of(name), text.attention(at, **how)(f"{name}.self_attn"), mlp(f"{name}.mlp"))

    return text.model(norm, layers)


def _attention_of(config: JsonObject) -> dict[str, Any]:
    limit = 0.0 if config.get("clip_qkv") is None else number(config, "clip_qkv")
    return {**attention_biases(config), "limit": limit}


def _read_olmo2(
    config: JsonObject, architecture: str, ropes: Ropes | None = None, windows: tuple[int, ...] | None = None
) -> Network:
    text = TextConfig.read(config, architecture, ropes=ropes, windows=windows, default_eps=1e-5)
    return text.model(text.norm(), post_norm_layers(text, **attention_biases(config), qk_norm="projection"))


def post_norm_layers(text: TextConfig, **how: Any) -> Callable[[int, str], Iterator[Operation]]:
    """Return a function that yields the operations of a layer, given its number and name. The layer has norms after
    attention and the MLP, and none before them. The keyword arguments `how` set fields of `Attention`."""
    norm, mlp = text.norm(), text.mlp()

    def layers(at: int, name: str) -> Iterator[Operation]:
        yield from text.attention(at, **how)(f"{name}.self_attn", source="x")
        yield from add_update(norm, f"{name}.post_attention_layernorm")
        yield from mlp(f"{name}.mlp", source="x")
        yield from add_update(norm, f"{name}.post_feedforward_layernorm")

    return layers


def _read_olmo3(config: JsonObject, architecture: str) -> Network:
    kinds = [FULL if layer % 4 == 3 else SLIDING for layer in range(num_layers_of(config))]
    layer_types, windows = read_windows(config, kinds)
    ropes = read_ropes_by_kind(config, layer_types, {FULL: 500_000.0, SLIDING: 500_000.0})
    return _read_olmo2(config, architecture, ropes, windows)


def _read_olmoe(config: JsonObject, architecture: str) -> Network:
    text = TextConfig.read(config, architecture, default_eps=1e-5)
    experts = text.experts(intermediate_key="intermediate_size", renormalizes=flag(config, "norm_topk_prob", False))

    def mlp(at: int, name: str) -> Iterator[Operation]:
        yield from experts(f"{name}.mlp.gate", f"{name}.mlp.experts.{{expert}}")

    return text.llama(mlp, **_attention_of(config), qk_norm="projection")


OLMO = Family(("OlmoForCausalLM",), _read_olmo)
OLMO2 = Family(("Olmo2ForCausalLM",), _read_olmo2)
OLMO3 = Family(("Olmo3ForCausalLM",), _read_olmo3)
OLMOE = Family(("OlmoeForCausalLM",), _read_olmoe)
