"""The formats of quantised weights, the rules that assign formats to modules, and checks of settings."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.common.gguf import fault
from pagewire.network.checkpoint_files import CONFIG_FILE, CheckpointError

SECTION = "quantization_config"
HEAD = re.compile(r"^lm_head$")
ANY = re.compile("")
_MAX_SIZE = 1 << 24
_MAX_PATTERN_CHARS = 10_000


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format in which a quantised checkpoint stores one weight matrix [out, in].

    A quantisation scale covers a block of `rows` outputs by `columns` inputs. A value of 0 means all outputs or all
    inputs.
    """

    layout: str  # the name of a `Layout` in the worker
    bits: int
    rows: int
    columns: int
    is_symmetric: bool = True  # there are no zero points, or all are in the middle of the range
    has_act_order: bool = False  # the group of each column is stored (act-order)
    rounds_inputs: bool = False  # the weight was made for inputs rounded to 8 bits of the same type

    def describe(self) -> str:
        """Return a short description of this weight format for messages: the layout and the number of bits."""
        return f"{self.layout} in {self.bits} bits"


@dataclass(frozen=True, slots=True)
class QuantizationRule:
    """A rule that assigns a weight format to each linear module of a checkpoint whose name matches a pattern. With
    `names`, the rule applies to the modules of these names and to the modules in them instead. If `format` is None,
    these modules are not quantised."""

    pattern: re.Pattern[str]
    format: WeightFormat | None
    source: tuple[str, str] = ("", "")  # the key and value of a regular expression given by the checkpoint
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation formats of all linear modules of a checkpoint. The format of a module is decided by the first
    rule whose pattern matches the module's name."""

    method: str
    rules: tuple[QuantizationRule, ...]


def names_of(section: Mapping[str, Any], key: str) -> Iterable[str]:
    """Return the names of modules that a setting lists. Raises CheckpointError if the setting is no list of names."""
    value = section.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise unserved(key, value, "a list of module names")
    return value


def pattern_rule(key: str, name: str, expression: str, weight_format: WeightFormat | None) -> QuantizationRule:
    """Return the quantisation rule for modules whose names match a regular expression from the start, as with
    `re.match`. Raises CheckpointError if the expression is invalid or too long."""
    if len(expression) > _MAX_PATTERN_CHARS:
        raise unserved(key, name, f"a regular expression of at most {_MAX_PATTERN_CHARS} characters")
    try:
        return QuantizationRule(re.compile(rf"^(?:{expression})"), weight_format, (key, name))
    except (re.error, RecursionError, OverflowError) as error:
        raise unserved(key, name, f"a regular expression: {error}") from error


def glob_rule(key: str, name: str, weight_format: WeightFormat | None) -> QuantizationRule:
    """Return the quantisation rule for a module and the modules in it. A name with wildcards means all modules whose
    whole names match it, as with `fnmatch`. Raises CheckpointError if the name is too long."""
    if any(character in name for character in "*?["):
        return pattern_rule(key, name, fnmatch.translate(name), weight_format)
    return QuantizationRule(ANY, weight_format, names=frozenset((name,)))


def named_rules(formats: Mapping[str, WeightFormat | None]) -> Iterator[QuantizationRule]:
    """Yield quantisation rules for modules with formats of their own, and for the modules in them. There is one rule
    for each format, because files may list all experts of a model."""
    names = defaultdict(set)
    for name, weight_format in formats.items():
        names[weight_format].add(name)
    for weight_format, modules in names.items():
        yield QuantizationRule(ANY, weight_format, names=frozenset(modules))


def component_rules(section: Mapping[str, Any], *keys: str) -> Iterator[QuantizationRule]:
    """Yield a quantisation rule for each module that the settings leave unquantised. A configured name matches whole
    dotted components of a module name: `mlp.gate` does not match `mlp.gate_proj`."""
    for key in keys:
        for name in names_of(section, key):
            yield QuantizationRule(re.compile(rf"(^|\.){re.escape(name.strip('.'))}(\.|$)"), None)


def group_size_of(section: Mapping[str, Any], default: int = 128) -> int:
    """Return the group size: the number of inputs that share one quantisation scale. A result of 0 means that all
    inputs share one scale. Config files write -1 for this case."""
    value = section.get("group_size", default)
    return 0 if value == -1 or (value == 0 and default == 0) else positive("group_size", value)


def block_of(key: str, value: object) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that share a scale. Raises CheckpointError if they are no such pair."""
    if not isinstance(value, list) or len(value) != 2:
        raise unserved(key, value, "two whole numbers: outputs and inputs that share a scale")
    return positive(key, value[0]), positive(key, value[1])


def positive(key: str, value: object) -> int:
    """Return a size from the settings. Raises CheckpointError if the value is no whole number of at least 1."""
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        raise unserved(key, value, f"a whole number from 1 to {_MAX_SIZE}")
    return value


def choice(section: Mapping[str, Any], key: str, default: int, choices: tuple[int, ...], where: str) -> int:
    """Return the number that a setting has, or the default. Raises CheckpointError if it is none of `choices`. `where`
    ends the list of choices in the message, such as " with gptq"."""
    value = section.get(key, default)
    if type(value) is not int or value not in choices:
        raise unserved(key, value, f"{' or '.join(map(str, choices))}{where}")
    return value


def flag(section: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return the boolean that a setting has. Null means the default. Raises CheckpointError for any other value."""
    value = section.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise unserved(key, value, "true or false")
    return value


def unserved(key: str, value: object, expected: str) -> CheckpointError:
    """Return the error for an unsupported setting: its name, its value, and what it must be instead."""
    where = key if key == SECTION else f"{SECTION}: {key}"
    return CheckpointError(fault(f"{CONFIG_FILE}: {where}", value, expected))
