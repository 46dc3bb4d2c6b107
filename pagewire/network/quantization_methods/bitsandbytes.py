"""bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes) in 4 and 8 bits, as transformers stores it."""

from collections.abc import Iterator, Mapping
from typing import Any

from pagewire.network.weight_formats import ANY, QuantizationRule, WeightFormat, component_rules, flag, unserved

_TYPES = ("nf4", "fp4")


def bitsandbytes_rules(section: Mapping[str, Any]) -> Iterator[QuantizationRule]:
    """Yield the quantisation rules of a bitsandbytes checkpoint, in order of precedence. Outliers of activations
    (`llm_int8_threshold`) are ignored, because inputs are not rounded per tensor. The LM head is quantised if it is
    stored so: a list of modules to skip replaces transformers' default, which names the head."""
    yield from component_rules(section, "llm_int8_skip_modules")
    if flag(section, "load_in_8bit", False):
        yield QuantizationRule(ANY, WeightFormat("llm-int8", 8, 1, 0))
        return
    if not flag(section, "load_in_4bit", False):
        raise unserved("load_in_4bit", False, "true, or load_in_8bit must be true")
    kind = section.get("bnb_4bit_quant_type", "fp4")
    if kind not in _TYPES:
        raise unserved("bnb_4bit_quant_type", kind, f"one of {', '.join(_TYPES)}")
    yield QuantizationRule(ANY, WeightFormat(kind, 4, 0, 0))
