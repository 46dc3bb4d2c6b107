"""The flags of commands that run parts on a GPU: the parts, their time limit, and the results file."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from testing.ledger import path_of
from testing.part import Report, describe
from testing.record import RESULTS

SECONDS = 450.0


def part_parser(command: str, description: str | None, parts: Mapping[str, object]) -> argparse.ArgumentParser:
    """Return a parser whose help lists the parts.

    The process of a part receives --part, and --done with the names of the finished cases.
    """
    width = max(map(len, parts))
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name:{width}} {part.__doc__}" for name, part in parts.items()),
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), metavar="PART", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a part may take (default: %(default)g)")
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS}/gpu_{_last_word(command)}.CARD.json")
    parser.add_argument("--part", choices=parts, help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=(), help=argparse.SUPPRESS)
    return parser


def open_report(command: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> Report:
    """Return the report of a command.

    Exits with an error message if there is no device, or if a rehearsal names no output file.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine that has one, with torch built for it")
    if options.device != "cuda" and options.output is None:
        parser.error(f"on {options.device} this is a rehearsal: name a file for its results with --output")
    heading = describe(torch.device(options.device))
    return Report(options.output or path_of(_last_word(command), heading["card"]), heading, options.parts)


def _last_word(command: str) -> str:
    """Return the last word of a command: `check` for `tests.gpu.check`, `speed` for `bench speed`."""
    return re.split("[. ]", command)[-1]
