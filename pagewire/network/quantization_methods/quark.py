"""Quark (https://quark.docs.amd.com): MXFP4 and FP8 weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagewire.network.weight_formats import (
    ANY,
    QuantizationRule,
    WeightFormat,
    glob_rule,
    names_of,
    pattern_rule,
    unserved,
)

_DECISIVE = ("dtype", "qscheme", "group_size", "scale_format")
_SUPPORTED = "fp4 per group of 32 with e8m0 scales, or fp8_e4m3 per tensor or channel"


def quark_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of a Quark checkpoint, in order of precedence: excluded modules, settings of single
    modules, and the settings of all others. The quantisation of KV caches is ignored."""
    for name in names_of(section, "exclude"):
        if name.startswith("re:"):
            yield pattern_rule("exclude", name, name.removeprefix("re:"), None)
        else:
            yield glob_rule("exclude", name, None)
    layers = section.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping) or section.get("layer_type_quant_config"):
        raise unserved("layer_quant_config", layers, "an object of settings by name, without layer_type_quant_config")
    for name, settings in layers.items():
        yield glob_rule("layer_quant_config", name, _format(settings))
    yield QuantizationRule(ANY, _format(section.get("global_quant_config")))


def _format(settings: object) -> WeightFormat | None:
    """Return the format of weights with the given settings, or None if they are not quantised."""
    match settings:
        case None | {"weight": None}:
            return None
        case {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}:
            return WeightFormat("quark-mxfp4", 4, 1, 32)
        case {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor" | "per_channel" as scheme}, **others}:
            inputs = others.get("input_tensors")
            rounds = isinstance(inputs, Mapping) and inputs.get("dtype") == "fp8_e4m3"
            return WeightFormat("float-quantized", 8, int(scheme == "per_channel"), 0, rounds_inputs=rounds)
    weight = settings.get("weight") if isinstance(settings, Mapping) else settings
    if isinstance(weight, Mapping):  # without the settings that do not decide
        weight = {key: weight[key] for key in _DECISIVE if key in weight}
    raise unserved("weight", weight, _SUPPORTED)
