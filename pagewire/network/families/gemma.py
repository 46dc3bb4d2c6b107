"""Gemma (Gemma team, 2024, https://arxiv.org/abs/2403.08295), 2 (2024, https://arxiv.org/abs/2408.00118) and 3 (2025,
https://arxiv.org/abs/2503.19786).

Norms multiply by 1 + weight, and embeddings are multiplied by the square root of the hidden size. From Gemma 2 on,
norms follow attention and the MLP, too. Gemma 2 bounds scores and logits. Gemma 3 normalizes heads instead, and its
sliding-window layers use a different rope base.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from pagewire.network.blocks import activation, layer
from pagewire.network.families.family import Family, TextConfig, inside, norms_of
from pagewire.network.families.positions import FULL, SLIDING, Ropes, read_ropes_by_kind, read_windows
from pagewire.network.families.reading import (
    JsonObject,
    attention_biases,
    expect,
    flag,
    num_layers_of,
    number,
    number_or_none,
    positive,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Operation

# Defaults of settings that files may omit.
_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA3_DEFAULTS = {**_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}


def _read_gemma(config: JsonObject, architecture: str) -> Network:
    _check_direction(config)
    text = TextConfig.read(config, architecture, activations=("gelu_pytorch_tanh", "gelu"))
    # Published files say gelu, and were trained with the approximation by tanh.
    norm, mlp = text.norm(adds_one=True), text.mlp(activation=activation("gelu_tanh"))

    def layers(at: int, name: str) -> Iterator[Operation]:
        attention = text.attention(at, **attention_biases(config))(f"{name}.self_attn")
        yield from layer(norm, norms_of(name), attention, mlp(f"{name}.mlp"))

    return text.model(norm, layers, embedding_factor=math.sqrt(text.hidden_size))


def _read(
    config: JsonObject,
    architecture: str,
    windows: tuple[int, ...],
    ropes: Ropes | None,
    softcaps: tuple[float, float],
) -> Network:
    """Read the config.json of a Gemma 2 or Gemma 3 model, and return the model. `softcaps` has the softcap of attention
    scores and the softcap of logits. A softcap c bounds a value x to c * tanh(x / c); 0 means no bound."""
    text = TextConfig.read(
        config,
        architecture,
        ropes=ropes,
        windows=windows,
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
    )
    norm, mlp, scale = text.norm(adds_one=True), text.mlp(), number(config, "query_pre_attn_scalar", 256) ** -0.5
    how = {**attention_biases(config), "norm_adds_one": True, "qk_norm": "none" if ropes is None else "head"}

    def layers(at: int, name: str) -> Iterator[Operation]:
        yield from layer(
            norm,
            (f"{name}.input_layernorm", f"{name}.pre_feedforward_layernorm"),
            text.attention(at, text.heads(at, scale, softcaps[0]), **how)(f"{name}.self_attn"),
            mlp(f"{name}.mlp"),
            post_norms=(f"{name}.post_attention_layernorm", f"{name}.post_feedforward_layernorm"),
        )

    return text.model(norm, layers, embedding_factor=math.sqrt(text.hidden_size), softcap=softcaps[1])


def _check_direction(config: JsonObject) -> None:
    if config.get("use_bidirectional_attention"):  # null means false
        expect(config, "use_bidirectional_attention", False)


def _softcaps(config: JsonObject, of_scores: float, of_logits: float) -> tuple[float, float]:
    """Read the softcap of attention scores and the softcap of logits from config.json; 0 means no bound. `of_scores`
    and `of_logits` are the defaults."""
    attention = number_or_none(config, "attn_logit_softcapping", of_scores)
    return attention, number_or_none(config, "final_logit_softcapping", of_logits)


def _read_gemma2(config: JsonObject, architecture: str) -> Network:
    _check_direction(config)
    _, windows = read_windows(config, [FULL if layer % 2 else SLIDING for layer in range(num_layers_of(config))])
    return _read(config, architecture, windows, None, _softcaps(config, 50.0, 30.0))


def _read_gemma3(config: JsonObject, architecture: str) -> Network:
    interval = positive(config, "sliding_window_pattern", 6)
    kinds = [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers_of(config))]
    layer_types, windows = read_windows(config, kinds)
    is_bidirectional = flag(config, "use_bidirectional_attention", False)
    if is_bidirectional:  # the setting counts the positions on both sides
        windows = tuple(window // 2 + 1 if window else 0 for window in windows)
    thetas = {FULL: 1_000_000.0, SLIDING: number(config, "rope_local_base_freq", 10_000.0)}
    ropes, _ = read_ropes_by_kind(config, layer_types, thetas, shares_theta=False)
    # max_position_embeddings already includes the rope scaling.
    num_positions = positive(config, "max_position_embeddings")
    softcaps = _softcaps(config, 0.0, 0.0)
    if softcaps[0]:
        raise unserved("attn_logit_softcapping", softcaps[0], "null: Gemma 3 normalizes heads instead")
    network = _read(config, architecture, windows, (ropes, num_positions), softcaps)
    return replace(network, is_bidirectional=is_bidirectional)


GEMMA = Family(
    ("GemmaForCausalLM",),
    _read_gemma,
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
)
GEMMA2 = Family(("Gemma2ForCausalLM",), _read_gemma2, defaults=_DEFAULTS)
GEMMA3 = Family(("Gemma3ForCausalLM",), _read_gemma3, defaults=_GEMMA3_DEFAULTS)
GEMMA3_WITH_VISION = inside(GEMMA3, "Gemma3ForConditionalGeneration", ("gemma3_text",))
