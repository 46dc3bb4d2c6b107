"""Reads the settings of config.json about positions: rotary embedding, sliding windows, and layer types."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagewire.common.gguf import shown
from pagewire.network.families.reading import (
    MAX_SIZE,
    JsonObject,
    checked_number,
    expect,
    flag,
    json_object,
    non_negative,
    num_layers_of,
    number,
    positive,
    unserved,
)
from pagewire.network.rope import RopeConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
_LONGROPE_ORIGINAL = 4096  # the default if config.json does not set the original length

# The rope settings of each layer, and the number of positions that they support.
Ropes = tuple[tuple[RopeConfig | None, ...], int]


def read_rope(
    config: JsonObject,
    *,
    default_theta: float = 10_000.0,
    default_share: float | None = None,
    is_interleaved: bool = False,
) -> Ropes:
    """Read the settings of rotary position embedding (rope) from config.json, for a model with the same rope in all
    layers. Return the settings of each layer, and the model's number of positions.

    The defaults match transformers. As in vLLM, linear and yarn scaling multiply the number of positions by their
    factor. `default_share` is the default share of a head's values that is rotated. It is None if models of this family
    always rotate all values.
    """
    rope = rope_settings(config, default_theta, default_share)
    for key, value in rope.items():
        if isinstance(value, Mapping):
            raise unserved(
                f"rope_parameters.{key}",
                value,
                "a single value: all layers of this architecture use the same parameters",
            )
    share = _read_share(config, rope, default_share)
    read, num_positions = _read_settings(rope, positive(config, "max_position_embeddings"), default_theta)
    read = replace(read, rotary_share=share, is_interleaved=is_interleaved)
    return (read,) * num_layers_of(config), num_positions


def read_ropes_by_kind(
    config: JsonObject,
    layer_types: list[str],
    default_thetas: Mapping[str, float],
    *,
    shares_theta: bool = True,
) -> Ropes:
    """Read the settings of rotary position embedding (rope) from config.json, for a model whose layer types have
    different ropes. Return the settings of each layer, and the number of positions of full-attention layers.

    transformers 4 writes a single set of settings. The scaling in this set then applies to full attention only, and so
    does the rope base, unless `shares_theta` is set.
    """
    settings = rope_settings(config, default_thetas[FULL])
    nested = {kind: json_object(settings, kind) for kind in default_thetas}
    if not any(nested.values()):
        unscaled = {"rope_theta": settings["rope_theta"]} if shares_theta else {}
        nested = {kind: settings if kind == FULL else unscaled for kind in default_thetas}
    ropes = {}
    for kind, theta in default_thetas.items():
        _read_share(config, nested[kind], None)
        expect(nested[kind], "truncate", True)  # transformers ignores this setting for a single layer type
        ropes[kind] = _read_settings(nested[kind], positive(config, "max_position_embeddings"), theta)
    return tuple(ropes[kind][0] for kind in layer_types), ropes[FULL][1]


def rope_settings(
    config: JsonObject, default_theta: float = 10_000.0, default_share: float | None = None
) -> dict[str, Any]:
    """Return the settings of rotary position embedding (rope) from config.json, in one form for all versions of
    transformers.

    transformers 4 wrote `rope_theta` and `rope_scaling`, with null for no scaling. transformers 5 writes
    `rope_parameters`. If a file has both, `rope_scaling` wins, as in transformers, since model cards ask users to add
    it. The original length may also be a setting next to these objects.

    Raises CheckpointError if settings contradict each other.
    """
    parameters, scaling = json_object(config, "rope_parameters"), json_object(config, "rope_scaling")
    outer = {"rope_theta": config.get("rope_theta")}
    settings = {**outer, **(scaling or parameters)}
    if FULL in parameters and scaling:
        scaled = {**json_object(parameters, FULL), **scaling}
        _check_agreement(json_object(parameters, FULL), scaled)
        settings = {**outer, **parameters, FULL: scaled}
    elif parameters and scaling:
        defaults = {"rope_theta": default_theta, "partial_rotary_factor": default_share}
        # The values that transformers uses if rope_scaling omits them.
        around = {key: value if config.get(key) is None else config[key] for key, value in defaults.items()}
        _check_agreement(parameters, {**around, **scaling})
    original = config.get(ORIGINAL)
    if original is None:
        return settings
    if settings.get(ORIGINAL) not in (None, original):
        expected = f"{shown(original)}, the same as {ORIGINAL}"
        raise unserved(f"rope_parameters.{ORIGINAL}", settings[ORIGINAL], expected)
    return {**settings, ORIGINAL: original}


def _check_agreement(parameters: JsonObject, scaling: JsonObject) -> None:
    """Raise CheckpointError if `rope_scaling` contradicts `rope_parameters` in the same config.json, because it is
    unclear which of them is right. A `rope_parameters` without scaling is no contradiction: users add `rope_scaling`
    for this case."""
    for key, value in parameters.items():
        names = ("rope_type", "type") if key in ("rope_type", "type") else (key,)
        given = next((scaling[name] for name in names if scaling.get(name) is not None), None)
        is_unscaled = len(names) > 1 and value == "default"
        if value is not None and not is_unscaled and given != value:
            expected = (
                f"{shown(value)}, the same as rope_parameters.{key}; change one of them, or remove one of the two "
                "objects"
            )
            raise unserved(f"rope_scaling.{key}", given, expected)


def read_layer_types(
    config: JsonObject, default: list[str], kinds: tuple[str, ...], required: str | None = None
) -> list[str]:
    """Return the attention type of each layer, such as `sliding_attention`, from config.json. Return `default` if the
    file does not list the types. Raises CheckpointError for a type that is not in `kinds`, or if no layer has the type
    `required`."""
    num_layers = num_layers_of(config)
    layer_types = config.get("layer_types") or default
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise unserved("layer_types", layer_types, f"a list as long as num_hidden_layers, {num_layers}")
    for layer_type in layer_types:
        if not isinstance(layer_type, str) or layer_type not in kinds:
            raise unserved("layer_types", layer_type, f"{' or '.join(kinds)} throughout")
    if required is not None and required not in layer_types:
        raise unserved("layer_types", layer_types, f"a list with at least one {required}")
    return layer_types


def read_windows(
    config: JsonObject, default_types: list[str], default_window: int = 4096
) -> tuple[list[str], tuple[int, ...]]:
    """Return the attention type and the sliding window size of each layer, from config.json. The size is in tokens; 0
    means full attention."""
    window = sliding_window(config, default_window)
    layer_types = read_layer_types(config, default_types, (FULL, SLIDING))
    return layer_types, tuple(window if layer_type == SLIDING else 0 for layer_type in layer_types)


def read_chosen_windows(config: JsonObject) -> tuple[int, ...]:
    """Return the sliding window size of each layer in tokens; 0 means no window. The settings use_sliding_window,
    max_window_layers and layer_types in config.json choose the layers with a window."""
    window = sliding_window(config) if flag(config, "use_sliding_window", False) else 0
    if not config.get("layer_types"):
        max_window_layers = non_negative(config, "max_window_layers", 28)
        return tuple(window if layer >= max_window_layers else 0 for layer in range(num_layers_of(config)))
    layer_types = read_layer_types(config, [], (FULL, SLIDING) if window else (FULL,))
    return tuple(window if layer_type == SLIDING else 0 for layer_type in layer_types)


def read_equal_windows(config: JsonObject, default_window: int | None = 4096) -> tuple[int, ...]:
    """Return the sliding window size of each layer in tokens, for a model with the same window in every layer; 0 means
    no window. Raises CheckpointError if config.json sets layer_types, since such a model has no layer types."""
    if config.get("layer_types"):
        raise unserved(
            "layer_types", config["layer_types"], "unset: all layers of this architecture have the same type"
        )
    return (sliding_window(config, default_window),) * num_layers_of(config)


def read_no_windows(config: JsonObject, architecture: str) -> tuple[int, ...]:
    """Return a sliding window size of 0 (full attention) for each layer. Raises CheckpointError if config.json sets
    use_sliding_window, because `architecture` does not support it."""
    if config.get("use_sliding_window"):
        raise unserved("use_sliding_window", True, f"false for {architecture}")
    return (0,) * num_layers_of(config)


def sliding_window(config: JsonObject, default: int | None = 4096) -> int:
    """Return the size of the sliding window in tokens, from config.json. Return 0, for no window, if the setting is
    null."""
    if config.get("sliding_window", default) is None:
        return 0
    return positive(config, "sliding_window", default)


def read_rope_of_phi(
    config: JsonObject,
    head_dim: int,
    default_theta: float = 10_000.0,
    default_share: float | None = None,
    scale_keys: tuple[str, str] = ("attention_factor", "attention_factor"),
) -> Ropes:
    """Read the rope settings of Phi models from config.json. These models have default rope or LongRoPE. Return the
    settings of each layer, and the model's number of positions. `scale_keys` are the keys of LongRoPE's attention
    factors, for sequences up to the original length and for longer ones."""
    settings = rope_settings(config, default_theta, default_share)
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type in ("longrope", "su", "yarn"):  # transformers reads all three names as LongRoPE
        share = _read_share(config, settings, default_share)
        return _read_longrope(config, {"rope_theta": default_theta, **settings}, head_dim, share, scale_keys)
    if rope_type != "default":
        raise unserved("rope_type", rope_type, "default or longrope")
    return read_rope(config, default_theta=default_theta, default_share=default_share)


def _read_longrope(
    config: JsonObject, rope: JsonObject, head_dim: int, share: float, scale_keys: tuple[str, str]
) -> Ropes:
    """Read the settings of LongRoPE (Ding et al., 2024, https://arxiv.org/abs/2402.13753) from config.json. Return the
    rope settings of each layer, and the model's number of positions. LongRoPE has one list of factors for sequences up
    to the original length, and another list for longer sequences (see `RopeConfig.serving`). By default, both lists use
    the attention factor of the full extension."""
    num_positions = positive(config, "max_position_embeddings")
    short = _read_factors(rope, "short_factor", int(head_dim * share) // 2)
    original = positive(config, ORIGINAL, _LONGROPE_ORIGINAL)
    if rope.get(ORIGINAL) not in (None, original):
        raise unserved(f"rope_parameters.{ORIGINAL}", rope[ORIGINAL], f"{original}, the same as {ORIGINAL}")
    factor = number(rope, "factor", num_positions / original)
    default_scale = _longrope_attention_factor(factor, original)
    short_scale, long_scale = (number(rope, key, default_scale) for key in scale_keys)
    is_stretched = num_positions > original
    read = RopeConfig(
        theta=number(rope, "rope_theta"),
        original_max_position_embeddings=original if is_stretched else 0,
        attention_factor=long_scale if is_stretched else short_scale,
        short_attention_factor=short_scale,
        divisors=_read_factors(rope, "long_factor", len(short)) if is_stretched else short,
        short_divisors=short if is_stretched else (),
        rotary_share=share,
    )
    return (read,) * num_layers_of(config), num_positions


def _read_factors(rope: JsonObject, key: str, num_pairs: int) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != num_pairs:
        raise unserved(key, factors, f"a list of {num_pairs} numbers, one for each pair of values that is rotated")
    return tuple(checked_number(key, value) for value in factors)


def read_partial_rotary_factor(config: JsonObject, rope: JsonObject, key: str, default: float) -> float:
    """Return the share of each attention head's values that is rotated by rotary position embedding, above 0 and at
    most 1. Raises CheckpointError for any other number."""
    key = "partial_rotary_factor" if rope.get("partial_rotary_factor") is not None else key
    value = rope.get(key, config.get(key))
    share = checked_number(key, default if value is None else value)
    if share > 1:
        raise unserved(key, share, "at most 1")
    return share


def _read_share(config: JsonObject, rope: JsonObject, default: float | None) -> float:
    if default is not None:
        return read_partial_rotary_factor(config, rope, "partial_rotary_factor", default)
    value = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if value not in (None, 1, 1.0):
        raise unserved("partial_rotary_factor", value, "1")
    return 1.0


def _read_settings(rope: JsonObject, max_position_embeddings: int, default_theta: float) -> tuple[RopeConfig, int]:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise unserved("rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    theta = number(rope, "rope_theta", default_theta)
    if rope_type == "default":
        return RopeConfig(theta=theta), max_position_embeddings
    factor = number(rope, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor), _stretched(max_position_embeddings, factor)
    original = positive(rope, ORIGINAL, max_position_embeddings)
    if rope_type == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        if high < low:
            raise unserved("high_freq_factor", high, f"at least low_freq_factor, {low:g}")
        return RopeConfig("llama3", theta, factor, original, low, high), max_position_embeddings
    if theta == 1.0:
        raise unserved("rope_theta", theta, "a number other than 1 with yarn")
    yarn = RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True),
    )
    return yarn, max(max_position_embeddings, _stretched(original, factor))


def _stretched(num_positions: int, factor: float) -> int:
    stretched = int(num_positions * factor)
    if not 1 <= stretched <= MAX_SIZE:
        raise unserved("factor", factor, f"a number for which 1 to {MAX_SIZE} positions result from {num_positions}")
    return stretched


def _yarn_attention_factor(rope: JsonObject, factor: float) -> float:
    """Return the factor by which YaRN multiplies the cosines and sines of rotary position embedding (Peng et al., 2023,
    https://arxiv.org/abs/2309.00071, section 3.4)."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(number(rope, "mscale")) / magnitude(number(rope, "mscale_all_dim"))
    return magnitude(1.0)


def _longrope_attention_factor(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
