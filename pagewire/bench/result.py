"""The JSON output file of a benchmark, with the keys of `vllm bench`."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pagewire.bench.run import Run
from pagewire.client.server_info import ServerInfo
from pagewire.options import Parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", metavar="FILE", type=Path, help="write the figures to this file")
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def path_of(parser: Parser, parsed: argparse.Namespace) -> Path | None:
    """Return the path of the benchmark's JSON output file, or None if the flag `--output-json` was not given.

    If the file cannot be written, end the command before the benchmark starts.
    """
    path: Path | None = parsed.output_json
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make the folder of {path}: {error.strerror}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"cannot write {path}: give the name of a file in a folder that you may write to")
    return path


def write(path: Path, figures: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def figures(verb: str, info: ServerInfo, measured: Run, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a benchmark's JSON output file as a dict. The fields that all benchmarks share come first:
    the time, the model, and the server. The results of this benchmark, `own`, follow."""
    return {
        "date": f"{datetime.now():%Y%m%d-%H%M%S}",
        "backend": "pagewire",
        "benchmark": verb,
        "model_id": info.served_model_name,
        "server_version": info.version,
        "worker": None if info.worker is None else asdict(info.worker),
        "was_interrupted": measured.was_interrupted,
        **own,
    }
