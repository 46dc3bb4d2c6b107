"""The tables of docs/gpu.md, generated from the ledger: the results of each card, and the results older than the code.

`make docs` writes the tables.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.agenda import ENTRIES, RUNNERS, Pending
from testing import ledger
from testing.ledger import State
from testing.record import RESULTS

# Figures published by other projects, for other cards and loads. They are not a direct comparison.
PUBLISHED = {
    "decode step, Qwen3-8B shape, batch 1, 1k context": "SGLang, H100: 6.9 ms (sglang #21775)",
    "nano-vllm's workload, both services": "vLLM 0.19, H100, 512 tokens in, 128 out: 12,150 tok/s (kvcached #331)",
}
OLDER = "older than the code"
OURS, COMPILED, PRODUCTS = "ours", "torch.compile", "products alone"
# Parts with too many cases for the page. The result file lists them.
LISTED_ELSEWHERE = ("bench.gpu.products", "testing.kernel_checks.linear", "testing.kernel_checks.scaled")


def tables(folder: Path = RESULTS) -> str:
    """Return a section for each card that has results."""
    files = map(ledger.parts_of, sorted(folder.glob("gpu_*.json")))
    cards = sorted({part["card"] for file in files for part in file.values()})
    return "\n\n".join("\n".join(_section(folder, card)) for card in cards)


def _section(folder: Path, card: str) -> Iterator[str]:
    yield from (f"### {card}", "", f"| parts of | {' | '.join(_COLUMNS)} |", _rule(len(_COLUMNS) + 1))
    for command in RUNNERS:
        found = [each.pending(folder, card) for each in ENTRIES if each.command == command]
        yield f"| `{command}` | {' | '.join(_names(found, *states) for states in _COLUMNS.values())} |"
    path = ledger.path_of("speed", card, folder)
    if path.exists():
        goals = [goal for goal in json.loads(path.read_text()).get("goals", ()) if goal["value"] is not None]
        yield from ("", "| in bfloat16 | measured | goal | published, of others |", _rule(4), *map(_goal_row, goals))
    for command in RUNNERS:
        for name, part in ledger.parts_of(ledger.path_of(command, card, folder)).items():
            yield from _part(name, part)


def _part(name: str, part: ledger.Part) -> Iterator[str]:
    """Yield the table of a part, after a line about its source, if a table exists for the part's kind of results."""
    for title, row in _TABLES.items() if name not in LISTED_ELSEWHERE else ():
        if rows := [shown for each in part["results"] if (shown := row(each))]:
            age = f", {OLDER}" if ledger.state(part, ledger.digest_of(name)) is State.STALE else ""
            source = f"{part.get('commit') or 'no commit named'}, {part['date'][:10]}, torch {part['torch']}{age}"
            yield from ("", f"`{name.rpartition('.')[2]}` ({source}):", "", f"| {title} |", _rule(title.count("|") + 1))
            yield from rows


def _rule(num_columns: int) -> str:
    return f"|{'---|' * num_columns}"


_COLUMNS = {
    "current": (State.CURRENT,),
    OLDER: (State.STALE,),
    "never measured": (State.NEVER,),
    "begun, or failed": (State.STARTED, State.FAILED),
}


def _names(found: list[Pending], *states: State) -> str:
    return ", ".join(each.entry.part.rpartition(".")[2] for each in found if each.state in states) or "–"


def _goal_row(goal: Mapping[str, Any]) -> str:
    shown = f"{goal['value']:,.3g}" if goal["value"] < 1000 else f"{goal['value']:,.0f}"
    shown = shown if goal["is_met"] else f"**{shown}**"
    return f"| {goal['name']} | {shown} | {goal['goal']} | {PUBLISHED.get(goal['name'], '–')} |"


def _prompt_row(each: Mapping[str, Any]) -> str:
    if "prompt_tokens_per_s" not in each:
        return ""
    return f"| {each['name']} | {each['seconds'] * 1000:,.1f} ms | {each['prompt_tokens_per_s']:,.0f} tok/s |"


def _times_row(keys: tuple[str, ...], each: Mapping[str, Any]) -> str:
    times = [f"{each[key] * 1000:,.2f}" for key in keys if key in each]
    return f"| {each['name']} | {' | '.join(times)} |" if len(times) == len(keys) else ""


def _kernel_row(each: Mapping[str, Any]) -> str:
    if "bytes_moved" not in each:
        return ""
    rates = [f"{each['bytes_moved'] / each['seconds'] / 1e9:,.0f} GB/s"] * bool(each["bytes_moved"])
    rates += [f"{each['flops'] / each['seconds'] / 1e12:,.0f} TFLOP/s"] * bool(each["flops"])
    return f"| {each['name']} | {each['seconds'] * 1e6:,.1f} | {', '.join(rates)} |"


# For each heading, a function that formats a case, or returns "" for a case of another kind.
_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "prefill | to the last first token | rate": _prompt_row,
    "ms | first token, p50 | p99 | gap, p50 | p99": partial(
        _times_row, ("first_token_p50", "first_token_p99", "gap_p50", "gap_p99")
    ),
    "ms a step | ours | compiled plain model | products alone": partial(_times_row, (OURS, COMPILED, PRODUCTS)),
    "kernel, or a peer | µs | rate": _kernel_row,
}
