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
    for JSON, and `report(figures)`. Where figures differ by something else than the machine, `variant()` names it, and
    its flag `--only`, if it has one, a part that is measured alone: each has a file of its own. What `measure` returns
    as None, from a process that serves another, is not kept. A benchmark whose results have a form of their own has
    `main(flags)` instead.
    """
    if hasattr(module, "main"):
        return module.main(flags) or 0
    parser = parser_of(name, module.__doc__)
    module.add_flags(parser)
    parser.add_argument(
        "--output", type=Path, help=f"raw numbers (default: {RESULTS}/{name}.json, with the variant and part, if any)"
    )
    arguments = parser.parse_args(flags)
    state = machine()
    figures = module.measure(arguments)
    if inspect.iscoroutine(figures):
        figures = asyncio.run(figures)
    if figures is None:
        return 0
    names = [name, module.variant() if hasattr(module, "variant") else "", getattr(arguments, "only", "")]
    figures = {"machine": state, **figures}
    write(arguments.output or RESULTS / f"{'.'.join(filter(None, names))}.json", figures)
    module.report(figures)
    return 0


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """Returns a parser that says what the benchmark's docstring says."""
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
