"""Turns the options of `LLM`, Pagewire's own and those of other engines, into flags of `pagewire serve`."""

import warnings
from collections.abc import Mapping
from typing import Any

from pagewire.compatibility import FOREIGN, IN_PYTHON, MAPPED, suggestion, translate
from pagewire.sampling import is_real


def serve_flags(model: str, given: Mapping[str, Any]) -> list[str]:
    """Returns the flags of `pagewire serve` for options of either kind. Warns of those that are ignored.

    Raises TypeError for an unknown name, and ValueError for a value that cannot be.
    """
    from pagewire.cli.services import serve_options

    known = serve_options().keys() - {"model"}
    for name in given:
        if not (name in known or name in MAPPED or name in FOREIGN):
            near = suggestion(name, [*known, *MAPPED, *FOREIGN])
            raise TypeError(f"LLM has no option {name!r}{near}")
    wanted = translate({"model": model} | {name: _in_gib(name, value) for name, value in given.items()}, IN_PYTHON)
    for line in wanted.ignored:
        warnings.warn(line, stacklevel=3)
    return [_flag(name, value) for name, value in wanted.values.items() if name != "model" and value is not None]


def _in_gib(name: str, value: Any) -> Any:
    """Returns the text of a number of GiB, which `swap_space` is in Python; 0 is none."""
    return f"{value}GiB" if name == "swap_space" and is_real(value) else value


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a text, a number or a bool, got {value!r:.80}")
    return f"--{flag}={value}"
