"""ModelOpt (https://github.com/NVIDIA/Model-Optimizer): NVFP4, FP8, and mixtures of both by module."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pagewire.network.weight_formats import (
    ANY,
    QuantizationRule,
    WeightFormat,
    glob_rule,
    named_rules,
    names_of,
    unserved,
)

_NVFP4 = WeightFormat("nvfp4", 4, 1, 16)
_FP8 = WeightFormat("float-quantized", 8, 0, 0, rounds_inputs=True)
# By quant_algo. Scales of activations are ignored, and so is their rounding to 4 bits.
_ALGORITHMS = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": replace(_FP8, rows=1),
    "FP8_PB_WO": WeightFormat("float-quantized", 8, 128, 128),
}
_MIXED = "MIXED_PRECISION"


def modelopt_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of a ModelOpt checkpoint, in order of precedence. The settings are those of
    config.json, or those of hf_quant_config.json, which are nested in `quantization`. If they have no `quant_algo`,
    only the KV cache is quantised."""
    settings = section.get("quantization") or section
    if not isinstance(settings, Mapping):
        raise unserved("quantization", settings, "an object with a quant_algo")
    for key in ("exclude_modules", "ignore"):
        for name in names_of(settings, key):
            yield glob_rule(key, name, None)
    if settings.get("quant_algo") == _MIXED:
        yield from _mixed_rules(settings)
    elif settings.get("quant_algo") is not None:
        yield QuantizationRule(ANY, _format(settings, (*_ALGORITHMS, _MIXED)))


def _mixed_rules(settings: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Return the rules of a checkpoint that lists its quantised modules by name."""
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise unserved("quantized_layers", layers, "an object of objects with a quant_algo, by the names of modules")
    return named_rules({name: _format(layer, tuple(_ALGORITHMS)) for name, layer in layers.items()})


def _format(settings: Mapping[str, Any], choices: tuple[str, ...]) -> WeightFormat:
    algorithm, group_size = settings.get("quant_algo"), settings.get("group_size")
    if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
        raise unserved("quant_algo", algorithm, f"one of {', '.join(choices)}")
    weight_format = _ALGORITHMS[algorithm.upper()]
    if weight_format == _NVFP4 and group_size not in (None, _NVFP4.columns):
        raise unserved("group_size", group_size, f"{_NVFP4.columns} with {algorithm}")
    return weight_format
