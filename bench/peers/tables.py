"""Reports of the comparison with peers: tables in Markdown, goals that are met or missed, and a chart."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers.arms import LlamaCppArm, MistralRsArm, PagewireArm
from bench.peers.environment import BF16

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, LLAMA_CPP = PagewireArm.name, LlamaCppArm.name
PEERS = (LLAMA_CPP, MistralRsArm.name, "vLLM", "transformers generate", "transformers generate_batch")
COLORS = {name: f"C{index}" for index, name in enumerate((OURS, *PEERS))}


def markdown(found: dict) -> str:
    """Return a Markdown text with two tables for each model: a comparison of the formats, and all peers in bf16."""
    facts = found["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {found['num_threads']} threads each, {found['isa']}; "
        f"{found['date']}; random weights, with which vLLM and transformers compute in {found['torch_dtype']}. Tokens "
        f"per second, medians of {found['num_rounds']} runs (smallest to largest); in bold, how many times as fast "
        "Pagewire is."
    ]
    for model, formats in found["tokens_per_s"].items():
        lines += formats_table(found, model, formats)
        if formats.get(BF16, {}).keys() - {OURS, LLAMA_CPP}:
            lines += peers_table(found, model, formats[BF16])
    lines += [f"\nNot measured: {name} ({reason})." for name, reason in found["skipped"].items()]
    return "\n".join(lines)


def formats_table(found: dict, model: str, formats: dict) -> list[str]:
    """Return the lines of a table of medians: a row per load, and for each format our rate, the best peer's, and the
    ratio."""
    head = " | ".join(f"{name}: {OURS} | best peer | ratio" for name in formats)
    lines = ["", f"| {model} | {head} |", "|---|" + "---|" * (3 * len(formats))]
    ratio = _ratios(found, model)
    for load in found["loads"]:
        cells: list[str] = []
        for name, arms in formats.items():
            ours, best = arms.get(OURS, {}).get(load), best_peer(arms, load)
            cells.append("–" if ours is None else f"{ours['median']:,.0f}")
            cells.append("–" if best is None else f"{arms[best][load]['median']:,.0f} {best}")
            cells.append(f"**{ratio[name, load, best]:.2f}**" if best and (name, load, best) in ratio else "–")
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return lines


def best_peer(arms: dict, load: str) -> str | None:
    """Return the name of the fastest peer under a load, or None if no peer was measured."""
    medians = {name: of_arm[load]["median"] for name, of_arm in arms.items() if name != OURS and load in of_arm}
    return max(medians, key=lambda name: medians[name], default=None)


def peers_table(found: dict, model: str, arms: dict) -> list[str]:
    """Return the lines of the bf16 table: a row for each load, a column for each measured arm."""
    columns = [name for name in (OURS, *PEERS) if name in arms]
    lines = ["", f"| {model}, {BF16} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    ratio = _ratios(found, model)
    for load in found["loads"]:
        cells = [_cell(arms[arm].get(load), ratio.get((BF16, load, arm))) for arm in columns]
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return lines


def _ratios(found: dict, model: str) -> dict[tuple[str, str, str], float]:
    """Return a model's ratios by format, load and peer."""
    entries = [entry for entry in found["ratios"] if entry["model"] == model]
    return {(entry["format"], entry["load"], entry["peer"]): entry["ratio"] for entry in entries}


def _cell(rates: dict[str, float] | None, ratio: float | None) -> str:
    if rates is None:
        return "–"
    text = f"{rates['median']:,.0f} ({rates['min']:,.0f}–{rates['max']:,.0f})"
    return text if ratio is None else f"{text} **{ratio:.2f}**"


def report_goals(found: dict) -> None:
    for entry in found["ratios"]:
        if "goal" in entry:
            verdict = "met" if entry["is_met"] else "MISSED"
            what = f"{entry['model']}, {entry['format']}, {entry['load']}"
            comparison = f"{what}: {entry['ratio']:.2f} x {entry['peer']}"
            print(f"{comparison} (goal: at least {entry['goal']:g}: {verdict})", file=sys.stderr)


def report_buffers(buffers: dict[str, dict[str, list[str]]]) -> None:
    for model, formats in buffers.items():
        for name, found in formats.items():
            print(f"{model}, {name}: llama.cpp's weights are in {', '.join(found) or 'no buffer'}", file=sys.stderr)


def draw(found: dict, path: Path) -> None:
    """Draw a row of panels for each model, one panel for each load, with a bar for each format and arm.

    Without matplotlib, which is an optional dependency, nothing is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed (the extra `bench`)", file=sys.stderr)
        return
    tables, loads = found["tokens_per_s"], found["loads"]
    num_bars = max(len(bars(formats, load)) for formats in tables.values() for load in loads)
    size = (3.2 * len(loads), (0.22 * num_bars + 1.2) * len(tables) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tables), len(loads), squeeze=False)
    for row, (model, formats) in zip(panels, tables.items(), strict=True):
        for axes, load in zip(row, loads, strict=True):
            draw_panel(axes, bars(formats, load))
            axes.set_title(f"{model}: {load}", fontsize="small")
    shown = {arm for formats in tables.values() for arms in formats.values() for arm in arms}
    names = [name for name in COLORS if name in shown]
    handles = [panels[0][0].barh([0], [0], color=COLORS[name]) for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize="small")
    figure.savefig(path, dpi=120)


def bars(formats: dict, load: str) -> list[tuple[str, str, dict[str, float]]]:
    """Return the format, arm and rates of each bar of a panel, from the top. The arms of a format are adjacent."""
    found = []
    for name, arms in formats.items():
        found += [(name, arm, arms[arm][load]) for arm in COLORS if load in arms.get(arm, {})]
    return found


def draw_panel(axes: "Axes", drawn: list[tuple[str, str, dict[str, float]]]) -> None:
    """Draw the bars, with a gap between formats. The first bar of a format is labelled with the format's name."""
    labels, positions, position, before = [], [], 0.0, ""
    for name, arm, rates in drawn:
        position += 0.5 if before and name != before else 0.0
        labels.append("" if name == before else name)
        positions.append(position)
        spread = [[rates["median"] - rates["min"]], [rates["max"] - rates["median"]]]
        axes.barh([position], [rates["median"]], xerr=spread, color=COLORS[arm])
        position, before = position + 1, name
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.set_xlabel("tok/s", fontsize="small")
