"""Runs a benchmark: reads its flags, has it measure, keeps the raw numbers, and has it show them."""

import argparse
import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from testing.record import RESULTS, machine, write


def run(name: str, module: ModuleType, flags: Sequence[str]) -> int:
    """Returns the exit status.

    A benchmark is a module with `add_flags(parser)`, `measure(arguments)`, a coroutine or not, which returns figures
    for JSON, and `report(figures)`. Where figures differ by something else than the machine, `variant()` names it. What
    `measure` returns as None, from a process that serves another, is not kept. A benchmark whose results have a form
    of their own has `main(flags)` instead.
    """
    if hasattr(module, "main"):
        return module.main(flags) or 0
    parser = parser_of(name, module.__doc__)
    module.add_flags(parser)
    default = RESULTS / f"{name}.json"
    parser.add_argument("--output", type=Path, help=f"raw numbers (default: {default}, with the variant if there are)")
    arguments = parser.parse_args(flags)
    state = machine()
    figures = module.measure(arguments)
    if inspect.iscoroutine(figures):
        figures = asyncio.run(figures)
    if figures is None:
        return 0
    if hasattr(module, "variant"):
        default = default.with_suffix(f".{module.variant()}.json")
    figures = {"machine": state, **figures}
    write(arguments.output or default, figures)
    module.report(figures)
    return 0


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Returns a parser that says what the benchmark's docstring says."""
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
