"""Trinity (Arcee, 2025, https://huggingface.co/arcee-ai/Trinity-Mini).

It normalizes each head of queries and keys, and multiplies the attended values by gates. Norms precede and follow
attention and the MLP. Three layers of four have a sliding window, and the fourth has no positions. All layers but the
first ones have routed experts, which are chosen by sigmoid scores and corrections, and shared experts.
"""

import math
from collections.abc import Callable, Iterator

from pagewire.network.blocks import layer, shared_expert
from pagewire.network.families.family import Family, TextConfig
from pagewire.network.families.positions import FULL, SLIDING, read_rope, read_windows
from pagewire.network.families.reading import (
    MAX_EXPERTS,
    JsonObject,
    attention_biases,
    choice,
    expect,
    flag,
    non_negative,
    num_layers_of,
    number,
    positive,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation


def _read(config: JsonObject, architecture: str) -> Network:
    interval, (ropes, num_positions) = positive(config, "global_attn_every_n_layers", 4), read_rope(config)
    kinds = [SLIDING if (layer + 1) % interval else FULL for layer in range(num_layers_of(config))]
    kinds, windows = read_windows(config, kinds, default_window=1024)
    of_layers = tuple(rope if kind == SLIDING else None for rope, kind in zip(ropes, kinds, strict=True))
    text = TextConfig.read(config, architecture, ropes=(of_layers, num_positions), windows=windows, default_eps=1e-5)
    norm, mlp, biases = text.norm(), _expert_layers(text), attention_biases(config)

    def layers(at: int, name: str) -> Iterator[Operation]:
        yield from layer(
            norm,
            (f"{name}.input_layernorm", f"{name}.pre_mlp_layernorm"),
            text.attention(at, qk_norm="head", has_gate=True, **biases)(f"{name}.self_attn"),
            mlp(at, name),
            post_norms=(f"{name}.post_attention_layernorm", f"{name}.post_mlp_layernorm"),
        )

    factor = math.sqrt(text.hidden_size) if flag(config, "mup_enabled", False) else 1.0
    return text.model(norm, layers, embedding_factor=factor)


def _expert_layers(text: TextConfig) -> Callable[[int, str], Iterator[Operation]]:
    """Return a function that yields the MLP operations of a layer, given its number and name."""
    config = text.config
    choice(config, "score_func", "sigmoid", ("sigmoid",))
    expect(config, "route_norm", True)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        positive(config, key, 1, limit=1)
    experts = text.experts(scoring="sigmoid", factor=number(config, "route_scale", 1.0))
    num_shared = positive(config, "num_shared_experts", 2, limit=MAX_EXPERTS)
    num_dense, dense = non_negative(config, "num_dense_layers", 1), text.mlp()
    shared = text.mlp(num_shared * experts.mlp.size)

    def mlp(at: int, name: str) -> Iterator[Operation]:
        if at < num_dense:
            yield from dense(f"{name}.mlp")
        else:
            correction = experts.correction(f"{name}.mlp.expert_bias")
            yield from experts(f"{name}.mlp.router.gate", f"{name}.mlp.experts.{{expert}}", correction=correction)
            yield from shared_expert(shared, f"{name}.mlp.shared_experts")

    return mlp


FAMILY = Family(("AfmoeForCausalLM",), _read, defaults={"head_dim": 128, "num_experts_per_tok": 8})
