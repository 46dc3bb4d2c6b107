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

_SUPPORTED = "fp4 per group of 32 with e8m0 scales, or fp8_e4m3 per tensor or channel"


def quark_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of a Quark checkpoint, in order of precedence: excluded modules, settings of single
    modules, and the settings of all others. The quantisation of KV caches is ignored."""
    for name in names_of(section, "exclude"):
        if name.startswith("re:"):
            yield pattern_rule("exclude", name, name.removeprefix("re:"), None)
        else:
            yield glob_rule("exclude", name, None)
    if section.get("layer_type_quant_config"):
        raise unserved("layer_type_quant_config", section["layer_type_quant_config"], "unset")
    layers = section.get("layer_quant_config") or {}
    if not isinstance(layers, Mapping):
        raise unserved("layer_quant_config", layers, "an object of settings by the names of modules")
    for name, settings in layers.items():
        yield glob_rule("layer_quant_config", name, _format("layer_quant_config", settings))
    settings = section.get("global_quant_config")
    yield QuantizationRule(ANY, None if settings is None else _format("global_quant_config", settings))


def _format(key: str, settings: object) -> WeightFormat | None:
    """Return the format of weights with the given settings, or None if they are not quantised."""
    if not isinstance(settings, Mapping):
        raise unserved(key, settings, "an object with a weight")
    weight, inputs = settings.get("weight"), settings.get("input_tensors")
    if weight is None:
        return None
    if not isinstance(weight, Mapping):
        raise unserved("weight", weight, _SUPPORTED)
    match tuple(weight.get(name) for name in ("dtype", "qscheme", "group_size", "scale_format")):
        case "fp4", "per_group", 32, "e8m0":
            return WeightFormat("quark-mxfp4", 4, 1, 32)
        case "fp8_e4m3", "per_tensor" | "per_channel" as scheme, *_:
            rounds = isinstance(inputs, Mapping) and inputs.get("dtype") == "fp8_e4m3"
            return WeightFormat("float-quantized", 8, int(scheme == "per_channel"), 0, rounds_inputs=rounds)
    raise unserved("weight", weight, _SUPPORTED)
