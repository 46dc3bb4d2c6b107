"""Running a benchmark: parsing its flags, measuring, storing the raw numbers, and printing a report."""

import argparse
import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from testing.record import RESULTS, machine, write


def run(name: str, module: ModuleType, flags: Sequence[str]) -> int:
    """Run a benchmark and return the exit status.

    A benchmark is a module with these functions:
    - `add_flags(parser)`.
    - `measure(arguments)`, possibly a coroutine, which returns figures for JSON. None is not stored; a helper process
      of a benchmark returns it.
    - `report(figures)`.
    - `variant()`, optional, which names a property other than the machine that changes the figures.
    - `main(flags)` in place of all others, if the results need a different format.

    Each variant has its own results file. If the benchmark has a flag `--only`, each value of the flag also has its own
    file.
    """
    if hasattr(module, "main"):
        return module.main(flags) or 0
    parser = parser_of(name, module.__doc__)
    module.add_flags(parser)
    parser.add_argument(
        "--output",
        type=Path,
        help=f"file for raw numbers (default: {RESULTS}/{name}.json, with the variant and part, if any)",
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
    """Return a parser whose description is the benchmark's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
