"""The model that a checkpoint's config.json describes, in one vocabulary for all families.

Both spellings of the file are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and transformers 5
(`rope_parameters`, `dtype`). What a family has no code for is refused by name, never ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from worker_service.models.checkpoint_files import CONFIG_FILE, CheckpointError, read_json, shown
from worker_service.models.quantization import Quantization, parse_quantization

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
DTYPES = ("float32", "bfloat16", "float16")
# Far above any model there is: what lies beyond is a mistake, and would be built before memory says so.
MAX_LAYERS = 1 << 12
MAX_SIZE = 1 << 24  # of a vector, a vocabulary, a head count, and of the positions of a sequence
_NUMBERS = (1e-30, 1e30)  # whose powers and products are finite in float32


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """How an architecture of `models/decoder.py` differs from others where config.json does not say."""

    # Layers with a sliding window: those that use_sliding_window, max_window_layers and layer_types choose, or all.
    windows: Literal["none", "chosen", "all"] = "none"
    has_attention_bias: bool = True  # where attention_bias says so; False: never
    has_qkv_bias: bool = False  # always, and the output projection never
    has_mlp_bias: bool = False  # where mlp_bias says so; False: never
    has_qk_norm: bool = False


# All that are served. One more that differs by its traits alone is one more line here.
DECODERS = {
    "LlamaForCausalLM": DecoderTraits(has_mlp_bias=True),
    "MistralForCausalLM": DecoderTraits(windows="all", has_attention_bias=False),
    "Qwen2ForCausalLM": DecoderTraits(windows="chosen", has_qkv_bias=True),
    "Qwen3ForCausalLM": DecoderTraits(windows="chosen", has_qk_norm=True),
}
GPT2 = "GPT2LMHeadModel"
_ARCHITECTURES = (GPT2, *DECODERS)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) and how its frequencies are scaled.

    A type uses the fields of its own line and leaves the others alone.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn; multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # [head_dim / 2] of the frequencies, by any type; none: not divided


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # positions the model can tell apart, rope scaling included
    norm_eps: float
    activation: str
    rope: RopeConfig | None  # None: learned positions
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of queries and keys
    windows: tuple[int, ...]  # [num_layers] positions a query attends to, its own included; 0: all up to its own
    dtype: str  # the checkpoint's own; float32 where it names none
    quantization: Quantization | None = None  # of the checkpoint's weights

    @property
    def sliding_window(self) -> int:
        """Positions that any layer attends to from a query, its own included; 0: all up to its own."""
        return max(self.windows) if all(self.windows) else 0

    @staticmethod
    def load(path: Path) -> "ModelConfig":
        """Reads config.json in a checkpoint directory.

        Raises:
            CheckpointError: the file is missing or broken, or asks for something that is not supported.
        """
        return parse_config(read_json(path / CONFIG_FILE))


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """The model that the contents of a config.json describe. See `ModelConfig.load`."""
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    model = _parse_gpt2(config) if architecture == GPT2 else _parse_decoder(config, architecture)
    if model.num_heads % model.num_kv_heads:
        raise _error("num_key_value_heads", model.num_kv_heads, f"a divisor of {model.num_heads} attention heads")
    if model.rope is not None and model.head_dim % 2:
        raise _error("head_dim", model.head_dim, "even, for rotary embedding")
    return model


def _parse_decoder(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    num_layers = _positive(config, "num_hidden_layers", limit=MAX_LAYERS)
    traits = DECODERS[architecture]
    attention_bias = traits.has_attention_bias and _flag(config, "attention_bias", False)
    rope, max_position_embeddings = _parse_rope(config, _positive(config, "max_position_embeddings"))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_positive(config, "num_key_value_heads", num_heads),
        head_dim=(
            _split_evenly("hidden_size", hidden_size, num_heads)
            if config.get("head_dim") is None
            else _positive(config, "head_dim")
        ),
        vocab_size=_positive(config, "vocab_size"),
        max_position_embeddings=max_position_embeddings,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        activation=_choice(config, "hidden_act", "silu", ("silu",)),
        rope=rope,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=traits.has_qkv_bias or attention_bias,
        output_bias=attention_bias and not traits.has_qkv_bias,
        mlp_bias=traits.has_mlp_bias and _flag(config, "mlp_bias", False),
        qk_norm=traits.has_qk_norm,
        windows=_parse_windows(config, traits.windows, num_layers),
        dtype=_dtype(config),
        quantization=parse_quantization(config),
    )


def _parse_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    for key, expected in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, expected) is not expected:
            raise _error(key, config[key], shown(expected))
    hidden_size, num_heads = _positive(config, "n_embd"), _positive(config, "n_head")
    num_layers = _positive(config, "n_layer", limit=MAX_LAYERS)
    return ModelConfig(
        architecture=GPT2,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_split_evenly("n_embd", hidden_size, num_heads),
        vocab_size=_positive(config, "vocab_size"),
        max_position_embeddings=_positive(config, "n_positions"),
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5),
        activation=_choice(config, "activation_function", "gelu_new", GELUS),
        rope=None,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(0,) * num_layers,
        dtype=_dtype(config),
    )


def _parse_windows(config: Mapping[str, Any], windows: str, num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window. Defaults are those of transformers."""
    layer_types = config.get("layer_types")
    if windows == "all":
        if layer_types:
            raise _error("layer_types", layer_types, "unset: every layer of this architecture is of one type")
        return (_sliding_window(config),) * num_layers
    window = _sliding_window(config) if _flag(config, "use_sliding_window", False) else 0
    if not layer_types:
        max_window_layers = config.get("max_window_layers", 28)
        if not _is_whole(max_window_layers) or max_window_layers < 0:
            raise _error("max_window_layers", max_window_layers, "a whole number from 0")
        return tuple(window if layer >= max_window_layers else 0 for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise _error("layer_types", layer_types, f"a list as long as num_hidden_layers, {num_layers}")
    window_of = {"full_attention": 0, "sliding_attention": window} if window else {"full_attention": 0}
    for layer_type in layer_types:
        if not isinstance(layer_type, str) or layer_type not in window_of:
            raise _error("layer_types", layer_type, f"{' or '.join(window_of)} throughout")
    return tuple(window_of[layer_type] for layer_type in layer_types)


def _sliding_window(config: Mapping[str, Any]) -> int:
    """0 where it is null, which stands for none."""
    if config.get("sliding_window", 4096) is None:
        return 0
    return _positive(config, "sliding_window", 4096)


def _parse_rope(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[RopeConfig, int]:
    """The rope settings, and how many positions they serve.

    Defaults are those of transformers. As in vLLM, linear and yarn scaling stretch the positions by their factor.
    """
    # Where transformers 4 left no scaling it wrote null.
    rope = {
        "rope_theta": config.get("rope_theta"),
        **(_object(config, "rope_parameters") or _object(config, "rope_scaling")),
    }
    for key, value in rope.items():
        if isinstance(value, Mapping):
            raise _error(f"rope_parameters.{key}", value, "a value: one set of parameters serves all layers")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise _error("rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    rotated_part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated_part not in (None, 1, 1.0):
        raise _error("partial_rotary_factor", rotated_part, "1")
    theta = _number(rope, "rope_theta", 10_000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta), max_position_embeddings
    factor = _number(rope, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor), _stretched(max_position_embeddings, factor)
    original = _positive(rope, "original_max_position_embeddings", max_position_embeddings)
    if rope_type == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if high <= low:
            raise _error("high_freq_factor", high, f"above low_freq_factor, {shown(low)}")
        return RopeConfig("llama3", theta, factor, original, low, high), max_position_embeddings
    if theta == 1.0:
        raise _error("rope_theta", theta, "another number than 1 with yarn")
    yarn = RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        truncate=_flag(rope, "truncate", True),
    )
    return yarn, max(max_position_embeddings, _stretched(original, factor))


def _stretched(num_positions: int, factor: float) -> int:
    stretched = int(num_positions * factor)
    if not 1 <= stretched <= MAX_SIZE:
        raise _error("factor", factor, f"a number that makes 1 to {MAX_SIZE} of {num_positions} positions")
    return stretched


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of cosines and sines; YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071), section
    3.4."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(_number(rope, "mscale")) / magnitude(_number(rope, "mscale_all_dim"))
    return magnitude(1.0)


def _architecture(config: Mapping[str, Any]) -> str:
    supported = ", ".join(_ARCHITECTURES)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise _error("architectures", architectures, f"a list of names; supported: {supported}")
    for architecture in architectures:
        if architecture in _ARCHITECTURES:
            return architecture
    if config.get("auto_map"):
        raise CheckpointError(f"the model brings its own code (auto_map), which is never run; supported: {supported}")
    named = ", ".join(architectures) or f"none (model_type {shown(config.get('model_type'))})"
    raise CheckpointError(f"{CONFIG_FILE}: architecture {named} is not supported; supported: {supported}")


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    if architecture == GPT2 and config.get("quantization_config"):
        raise _error("quantization_config", config["quantization_config"], f"unset for {GPT2}")
    if DECODERS.get(architecture, DecoderTraits()).windows == "none" and config.get("use_sliding_window"):
        raise _error("use_sliding_window", True, f"false for {architecture}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(config: Mapping[str, Any], key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{CONFIG_FILE} has no {key}, a whole number from 1 to {limit}")
    if not _is_whole(value) or not 1 <= value <= limit:
        raise _error(key, value, f"a whole number from 1 to {limit}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    least, most = _NUMBERS
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{CONFIG_FILE} has no {key}, a number from {least:g} to {most:g}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _error(key, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise _error(key, value, "true or false")
    return value


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Empty where it is null or missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _error(key, value, "an object")
    return value or {}


def _choice(config: Mapping[str, Any], key: str, default: str, choices: tuple[str, ...]) -> str:
    value = config.get(key, default)
    if value not in choices:
        raise _error(key, value, f"one of {', '.join(choices)}")
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in DTYPES:
        raise _error("dtype", value, f"one of {', '.join(DTYPES)}")
    return value


def _split_evenly(key: str, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise _error(key, hidden_size, f"a multiple of {num_heads} attention heads")
    return hidden_size // num_heads


def _error(key: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG_FILE}: {key} is {shown(value)}, but must be {expected}")
