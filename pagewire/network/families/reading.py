"""Functions that read and check values of a config.json. An error names the setting, its value, and the supported
values."""

from collections.abc import Mapping
from typing import Any

from pagewire.common.gguf import fault, is_whole, shown
from pagewire.network.checkpoint_files import CONFIG_FILE, CheckpointError
from pagewire.network.operations import Activation

# Limits far above any existing model. A larger value is a mistake, and would use up memory before it is noticed.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 10
MAX_SIZE = 1 << 24  # of a vector, a vocabulary, a number of heads, and the positions of a sequence

JsonObject = Mapping[str, Any]  # a config.json, or an object in it

DTYPES = ("float32", "bfloat16", "float16")
# The names of activations in transformers that differ from ours.
_ACTIVATIONS: dict[str, Activation] = dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
# Alternative names of the same setting.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "moe_k")
HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model")
_SAME = (
    NUM_EXPERTS,
    NUM_CHOSEN,
    HIDDEN_SIZE,
    ("num_hidden_layers", "n_layer", "n_layers"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("max_position_embeddings", "n_positions"),
)
_NUMBERS = (1e-30, 1e30)  # limits between which powers and products are finite in float32


def check_names(config: JsonObject) -> None:
    """Check the settings that config.json files store under several alternative names. Raise CheckpointError if two
    names of one setting have different values."""
    for names in _SAME:
        first, *others = [name for name in names if config.get(name) is not None] or [""]
        for name in others:
            if config[name] != config[first]:
                raise unserved(name, config[name], f"{shown(config[first])}, as {first} is")


def positive(config: JsonObject, key: str, default: int | None = None, limit: int = MAX_SIZE, *, least: int = 1) -> int:
    """Return a setting of config.json that must be a whole number from `least` to `limit`. Raises CheckpointError for
    another value, or if the setting is missing or null and has no default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{CONFIG_FILE} has no {key}, a whole number from {least} to {limit}")
    if not is_whole(value) or not least <= value <= limit:
        raise unserved(key, value, f"a whole number from {least} to {limit}")
    return value


def number(config: JsonObject, key: str, default: float | None = None) -> float:
    """Return a setting of config.json that must be a number from 1e-30 to 1e30. Raises CheckpointError for another
    value, or if the setting is missing or null and has no default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{CONFIG_FILE} has no {key}, a number from {_NUMBERS[0]:g} to {_NUMBERS[1]:g}")
    return checked_number(key, value)


def checked_number(key: str, value: object) -> float:
    """Return the value of a config.json setting as a float. Raises CheckpointError if the value is not a number from
    1e-30 to 1e30."""
    least, most = _NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise unserved(key, value, f"a number from {least:g} to {most:g}")
    return float(value)


def num_layers_of(config: JsonObject) -> int:
    return positive(config, "num_hidden_layers", limit=MAX_LAYERS)


def non_negative(config: JsonObject, key: str, default: int) -> int:
    """Return a setting of config.json that must be a whole number of at least 0. Return the default if the setting is
    missing. Raises CheckpointError for any other value."""
    value = config.get(key, default)
    if not is_whole(value) or value < 0:
        raise unserved(key, value, "a whole number from 0")
    return value


def first_key(config: JsonObject, *names: str) -> str:
    """Return the first of several alternative names under which a config.json contains a setting. Return the first name
    if the file contains none of them."""
    return next((name for name in names if config.get(name) is not None), names[0])


def number_or_none(config: JsonObject, key: str, default: float) -> float:
    """Return a setting of config.json that may be a number or null. Return 0 if the setting is null, and the default if
    the setting is missing."""
    if key not in config:
        return default
    return 0.0 if config[key] is None else number(config, key)


def flag(config: JsonObject, key: str, default: bool) -> bool:
    """Return a setting of config.json that must be true or false. Return the default if the setting is missing or null.
    Raises CheckpointError for another value."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise unserved(key, value, "true or false")
    return value


def attention_biases(config: JsonObject, default: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of `Attention` that say whether its projections have biases. Most families set all
    of them with the attention_bias setting of config.json."""
    return dict.fromkeys(("qkv_bias", "output_bias"), flag(config, "attention_bias", default))


def json_object(config: JsonObject, key: str) -> JsonObject:
    """Return a setting of config.json that must be a JSON object. Return an empty object if the setting is null or
    missing. Raises CheckpointError for another value."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise unserved(key, value, "an object")
    return value or {}


def choice(config: JsonObject, key: str, default: str, choices: tuple[str, ...]) -> str:
    """Return a setting of config.json that must be one of `choices`. Return the default if the setting is missing.
    Raises CheckpointError for another value."""
    value = config.get(key, default)
    if value not in choices:
        raise unserved(key, value, f"one of {', '.join(choices)}")
    return value


def read_activation(config: JsonObject, key: str, default: str, choices: tuple[str, ...]) -> Activation:
    return _ACTIVATIONS.get(name := choice(config, key, default, choices), name)


def dtype(config: JsonObject) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    value = "float32" if value == "float64" else value
    if value not in DTYPES:
        raise unserved("dtype", value, f"one of {', '.join(DTYPES)}")
    return value


def split_evenly(key: str, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise unserved(key, hidden_size, f"a multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def expect(config: JsonObject, key: str, expected: bool) -> None:
    """Check a boolean setting of config.json for which only the value `expected` is supported. Raise CheckpointError
    for another value. A missing setting is accepted."""
    if config.get(key, expected) is not expected:
        raise unserved(key, config[key], shown(expected))


def unserved(key: str, value: object, expected: str) -> CheckpointError:
    """Return the error for a config.json setting whose value is not supported. `expected` describes the supported
    values."""
    return CheckpointError(fault(f"{CONFIG_FILE}: {key}", value, expected))
