"""Parses how a checkpoint's weights are quantised, from `quantization_config` in config.json.

Two things are read: the formats of weights, and whether inputs are rounded to 8 bits before the matrix multiplication.
Published scales for activations are ignored; each row gets a scale of its own. An unsupported setting is refused by
name, and the error lists the supported values.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.network.checkpoint_files import CONFIG_FILE, CheckpointError, read_json
from pagewire.network.quantization_methods.bitsandbytes import bitsandbytes_rules
from pagewire.network.quantization_methods.modelopt import modelopt_rules
from pagewire.network.quantization_methods.quark import quark_rules
from pagewire.network.weight_formats import (
    ANY,
    HEAD,
    SECTION,
    Quantization,
    QuantizationRule,
    WeightFormat,
    block_of,
    choice,
    component_rules,
    flag,
    group_size_of,
    named_rules,
    names_of,
    pattern_rule,
    positive,
    unserved,
)

# The layouts of compressed-tensors by format name: the type of the numbers, the numbers of bits that are supported, and
# whether inputs may be rounded.
_COMPRESSED = {
    "pack-quantized": ("int", (4, 8), False),
    "int-quantized": ("int", (8,), True),
    "float-quantized": ("float", (8,), True),
    "nvfp4-pack-quantized": ("float", (4,), False),
    "mxfp4-pack-quantized": ("float", (4,), False),
}
_GROUP_SIZES = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}  # of the formats that have a fixed one
# The layouts of AutoRound's packing formats.
_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_gptq": "gptq", "auto_round:auto_awq": "awq", "auto_awq": "awq"}
# Known methods that are not supported, with the contents of their files.
_REFUSED = {
    "fbgemm_fp8": "FP8 rows for FBGEMM",
    "hqq": "codes of HQQ",
    "torchao": "tensors of torchao's own classes",
    "exl2": "codes for ExLlamaV2",
    "exl3": "codes for ExLlamaV3",
    "mlx": "codes for MLX on Apple processors",
}
# With the quant_method to assume if the file does not name one.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_FIRST_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # AWQ's names for these settings


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Parse the quantisation settings in the contents of a checkpoint's config.json. Return None if no weight is
    quantised. Raises CheckpointError if the settings are broken or not supported."""
    of_mlx = config.get("quantization")  # MLX writes this section, and a copy without quant_method
    section = config.get(SECTION) or config.get("compression_config") or of_mlx
    if not section:
        return None
    if not isinstance(section, Mapping):
        raise unserved(SECTION, section, f"an object with one of {', '.join(METHODS)} as quant_method")
    method = section.get("quant_method") or ("mlx" if of_mlx else None)
    if isinstance(method, str) and method in _REFUSED:
        raise CheckpointError(
            f"{CONFIG_FILE}: {SECTION}: the weights are {_REFUSED[method]} ({method}), which are not supported; use "
            "the same model in GGUF, AWQ, GPTQ, FP8 or compressed-tensors"
        )
    if not isinstance(method, str) or method not in _PARSERS:
        raise unserved("quant_method", method, f"one of {', '.join(METHODS)}")
    rules = tuple(_PARSERS[method](section))
    return Quantization(method, rules) if any(rule.format is not None for rule in rules) else None


def with_quantization_file(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the contents of a checkpoint's config.json with the quantisation settings included. ModelOpt and early
    GPTQ and AWQ tools stored these settings in a separate file, which is read from the checkpoint directory `path`.
    Raises CheckpointError if the settings in that file are broken or not supported."""
    name = next((name for name in _FILES if (path / name).is_file()), None)
    if name is None or config.get(SECTION) or config.get("compression_config"):
        return config
    section = {_FIRST_NAMES.get(key, key): value for key, value in read_json(path / name).items()}
    whole = {**config, SECTION: {"quant_method": _FILES[name], **section}}
    try:
        parse_quantization(whole)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(f"{CONFIG_FILE}: {SECTION}", name, 1)) from None
    return whole


# compressed-tensors


def _compressed_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of a compressed-tensors checkpoint, in order of precedence. As in the
    compressed-tensors package, exact module names precede patterns, and patterns precede module classes."""
    for key in ("transform_config", "sparsity_config"):
        value = section.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise unserved(key, value, "unset")
    for target in names_of(section, "ignore"):
        yield _target_rule("ignore", target, None)
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping):
        raise unserved("config_groups", groups, "an object of groups of weights, empty if no weight is quantised")
    found: list[tuple[int, QuantizationRule]] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise unserved("config_groups", {name: group}, "an object of objects with targets and weights")
        weight_format = _compressed_format(section, group)
        for target in names_of(group, "targets"):
            order = 2 if target == "Linear" else int(target.startswith("re:"))
            found.append((order, _target_rule("targets", target, weight_format)))
    yield from (rule for _, rule in sorted(found, key=lambda entry: entry[0]))


def _compressed_format(section: Mapping[str, Any], group: Mapping[str, Any]) -> WeightFormat | None:
    weights = group.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise unserved("weights", weights, "an object or null")
    layout = group.get("format") or section.get("format")
    kind = weights.get("type", "int")
    if layout == "naive-quantized":
        layout = "float-quantized" if kind == "float" else "int-quantized"
    if not isinstance(layout, str) or layout not in _COMPRESSED:
        raise unserved("format", layout, f"one of {', '.join((*_COMPRESSED, 'mixed-precision'))}")
    expected_kind, choices, may_round = _COMPRESSED[layout]
    if kind != expected_kind:
        raise unserved("type", kind, f"{expected_kind} in {layout}")
    bits = choice(weights, "num_bits", 8, choices, f" in {layout}")
    is_symmetric = flag(weights, "symmetric", True)
    if kind == "float" and not is_symmetric:
        raise unserved("symmetric", is_symmetric, f"true in {layout}")
    if layout in _GROUP_SIZES:
        size = _GROUP_SIZES[layout]
        rows, columns = 1, choice(weights, "group_size", size, (size,), f" in {layout}")
    else:
        rows, columns = _compressed_block(weights)
    actorder = weights.get("actorder")
    if actorder not in (None, False, "weight", "static", "group", "dynamic"):
        raise unserved("actorder", actorder, "null, weight or group")
    inputs = group.get("input_activations")
    rounds = isinstance(inputs, Mapping) and (inputs.get("num_bits", 8), inputs.get("type", "int")) == (8, kind)
    return WeightFormat(
        layout, bits, rows, columns, is_symmetric, actorder in ("group", "dynamic"), may_round and rounds
    )


def _compressed_block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size (rows, columns) of the blocks of a weight matrix that share one quantisation scale; 0 means all
    rows or all columns. The size depends on the setting `strategy` or, if `strategy` is not set, on the group size."""
    group_size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, positive("group_size", group_size)
    if strategy == "block":
        return block_of("block_structure", weights.get("block_structure"))
    raise unserved("strategy", strategy, "one of tensor, channel, group, block")


def _target_rule(key: str, target: str, weight_format: WeightFormat | None) -> QuantizationRule:
    """Return the quantisation rule for one target in the settings of a compressed-tensors checkpoint. A target is the
    name of a module, a regular expression after `re:`, or the class Linear, which means all linear modules."""
    if target.startswith("re:"):
        return pattern_rule(key, target, target.removeprefix("re:"), weight_format)
    return QuantizationRule(ANY if target == "Linear" else re.compile(rf"^{re.escape(target)}$"), weight_format)


# The other methods. With FP8, the head is quantised if it is stored so; otherwise the settings decide.


def _awq_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    choice(section, "bits", 4, (4,), " with awq")
    version = section.get("version") or section.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise unserved("version", version, "gemm with awq")
    if not flag(section, "zero_point", True):
        raise unserved("zero_point", False, "true with awq")
    yield from _unquantised_rules(section)
    yield QuantizationRule(HEAD, None)
    columns = group_size_of(section)
    yield QuantizationRule(ANY, WeightFormat("awq", 4, 1, columns, is_symmetric=False))


def _gptq_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    layout = section.get("checkpoint_format") or section.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unserved("checkpoint_format", layout, "one of gptq, gptq_v2")
    if section.get("is_marlin_format"):
        raise unserved("is_marlin_format", True, "false")
    pack_dtype = section.get("pack_dtype") or "int32"
    if pack_dtype != "int32":
        raise unserved("pack_dtype", pack_dtype, "int32")
    weight_format = _gptq_format(WeightFormat(layout, 4, 1, 128), section)
    yield from _unquantised_rules(section)
    dynamic = section.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise unserved("dynamic", dynamic, "an object of overrides by pattern")
    for pattern, override in dynamic.items():
        if pattern.startswith("-:"):
            yield pattern_rule("dynamic", pattern, pattern.removeprefix("-:"), None)
            continue
        if not isinstance(override, Mapping):
            raise unserved("dynamic", {pattern: override}, "an object of objects by pattern")
        overridden = _gptq_format(weight_format, override)
        yield pattern_rule("dynamic", pattern, pattern.removeprefix("+:"), overridden)
    if not flag(section, "lm_head", False):
        yield QuantizationRule(HEAD, None)
    yield QuantizationRule(ANY, weight_format)


def _auto_round_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of an AutoRound checkpoint, in order of precedence. Its tensors are those of GPTQ or
    AWQ. As in vLLM, overrides for names of modules precede overrides for regular expressions."""
    packing = section.get("packing_format") or "auto_round:auto_gptq"
    if not isinstance(packing, str) or packing not in _AUTO_ROUND:
        raise unserved("packing_format", packing, f"one of {', '.join(_AUTO_ROUND)}")
    base, overrides = WeightFormat(_AUTO_ROUND[packing], 4, 1, 128), section.get("extra_config") or {}
    if not isinstance(overrides, Mapping) or not all(isinstance(each, Mapping) for each in overrides.values()):
        raise unserved("extra_config", overrides, "an object of overrides by the names of modules")
    formats = {name: _auto_round_format(base, {**section, **override}) for name, override in overrides.items()}
    patterns = {name for name in formats if any(character in name for character in "*+?^$()[]{}|\\")}
    yield from named_rules({name: each for name, each in formats.items() if name not in patterns})
    for name in formats:
        if name in patterns:
            yield pattern_rule("extra_config", name, f".*(?:{name})", formats[name])
    yield QuantizationRule(HEAD, None)
    yield QuantizationRule(ANY, _auto_round_format(base, section))


def _auto_round_format(base: WeightFormat, section: Mapping[str, Any]) -> WeightFormat | None:
    if section.get("bits") == 16:
        return None
    if section.get("data_type", "int") != "int":
        raise unserved("data_type", section["data_type"], "int")
    return _gptq_format(base, section)


def _gptq_format(base: WeightFormat, section: Mapping[str, Any]) -> WeightFormat:
    """Return the GPTQ or AWQ weight format `base`, changed by the settings in `section`. The section is the
    quantisation config or an override for some modules."""
    choices, method = ((4,), "awq") if base.layout == "awq" else ((4, 8), "gptq")
    return replace(
        base,
        bits=choice(section, "bits", base.bits, choices, f" with {method}"),
        columns=group_size_of(section, base.columns),
        is_symmetric=flag(section, "sym", base.is_symmetric),
        has_act_order=flag(section, "desc_act", base.has_act_order),
    )


def _fp8_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    element = section.get("fmt") or "e4m3"
    if element not in ("e4m3", "float8_e4m3fn"):
        raise unserved("fmt", element, "e4m3")
    block = section.get("weight_block_size")
    rows, columns = (0, 0) if block is None else block_of("weight_block_size", block)
    yield from _unquantised_rules(section)
    yield QuantizationRule(ANY, WeightFormat("fp8", 8, rows, columns, rounds_inputs=True))


def _mxfp4_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of an MXFP4 checkpoint, in order of precedence. The configured names of modules to
    leave unquantised may be patterns, such as `model.layers.*.self_attn`."""
    for name in names_of(section, "modules_to_not_convert"):
        yield pattern_rule("modules_to_not_convert", name, rf"(?:{name})(\.|$)", None)
    yield QuantizationRule(HEAD, None)
    yield QuantizationRule(ANY, WeightFormat("mxfp4", 4, 1, 32))


_PARSERS = {
    "compressed-tensors": _compressed_rules,
    "awq": _awq_rules,
    "gptq": _gptq_rules,
    "fp8": _fp8_rules,
    "mxfp4": _mxfp4_rules,
    "modelopt": modelopt_rules,
    "quark": quark_rules,
    "bitsandbytes": bitsandbytes_rules,
    "auto-round": _auto_round_rules,
}
METHODS = tuple(_PARSERS)


def _unquantised_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    return component_rules(section, "modules_to_not_convert", "ignored_layers")
