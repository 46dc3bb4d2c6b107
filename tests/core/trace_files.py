"""Small trace files in the three formats, for the tests of the simulation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler_service.simulation.trace import AZURE_COLUMNS

BLOCK_SIZE = 64


def entry(
    num_prompt: int, num_output: int, blocks: Sequence[Sequence[int]], think_s: float | None = 0.0
) -> dict[str, Any]:
    """Return a request of a session, as a trace stores it."""
    return {"t": 0.0, "think_s": think_s, "api_s": 1.0, "input": num_prompt, "output": num_output, "blocks": blocks}


def write_sessions(path: Path, *sessions: list[dict[str, Any]]) -> Path:
    lines = [
        json.dumps({"session": f"s{i}", "block_size": BLOCK_SIZE, "requests": requests})
        for i, requests in enumerate(sessions)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_mooncake(path: Path, *requests: tuple[int, int, int, list[int]]) -> Path:
    """Write requests given as (milliseconds, prompt tokens, output tokens, blocks)."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, request, strict=True))) for request in requests]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_azure(path: Path, *requests: tuple[str, int, int]) -> Path:
    """Write requests given as (time of day, prompt tokens, output tokens)."""
    rows = [f"2023-11-16 {time},{num_prompt},{num_output}" for time, num_prompt, num_output in requests]
    path.write_text("\r\n".join([",".join(AZURE_COLUMNS), *rows]) + "\r\n", encoding="utf-8")
    return path
