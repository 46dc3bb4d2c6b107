"""Runs the same models and loads through Pagewire and through its peers, on this machine.

    python -m bench.peers

Pagewire runs as both services, over gRPC. Each arm starts, warms up, is measured and ends before the next begins; in
every round the order turns round. Peers that compute with torch do so in the dtype that the worker chooses here.
Figures are medians of the rounds, with the smallest and the largest. A peer that cannot be had here is left out, and
why is said. Raw numbers go to bench/results/peers.json, a chart beside them, and a table for the README to standard
output.
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from bench.checkpoint import SHAPES, random_checkpoint
from bench.peer_arms import (
    Arm,
    LlamaCppArm,
    Loads,
    Model,
    PagewireArm,
    PeerFailedError,
    ProgramArm,
    decode_name,
    transformers_arms,
)
from bench.peer_environment import LLAMA_CPP_PYTHON, VLLM, CannotMakeError, Environments
from bench.record import RESULTS, machine, write
from worker_service.startup.host_memory import available_bytes
from worker_service.startup.loader import choose_dtype
from worker_service.startup.pool_size import cpu_cache_bytes

OURS = PagewireArm.name
PINS = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP_PYTHON}
PEERS = ("llama.cpp", "vLLM", "transformers generate", "transformers generate_batch")


def goals(loads: Loads) -> dict[tuple[str, str], float]:
    """Returns how many times as fast as a peer Pagewire is to be, by load and peer."""
    found = {(decode_name(n), "llama.cpp"): 1.0 if n == 1 else 1.5 for n in loads.num_streams}
    found[loads.prefill_name, "llama.cpp"] = 1.2
    found[loads.mixed_name, "vLLM"] = 1.7
    found[loads.mixed_name, "transformers generate"] = 3.0
    found[loads.mixed_name, "transformers generate_batch"] = 6.0
    return found


class Measurement:
    """The arms that are there, and what each round of them gave."""

    def __init__(self, arms: Sequence[Arm], loads: Loads) -> None:
        self._arms = list(arms)
        self._loads = loads
        self.skipped: dict[str, str] = {}
        # By model, arm and load: a rate for each round.
        self.rounds: dict[str, dict[str, dict[str, list[float]]]] = {}

    def measure(self, models: Sequence[Model], num_rounds: int) -> None:
        for model in models:
            self._prepare(model)
        for model in models:
            for index in range(num_rounds):
                for arm in self._arms if index % 2 == 0 else self._arms[::-1]:
                    if arm.name not in self.skipped:
                        self._round(arm, model, index)

    def _prepare(self, model: Model) -> None:
        for arm in self._arms:
            if arm.name not in self.skipped:
                try:
                    arm.prepare(model)
                except CannotMakeError as error:
                    self._skip(arm, str(error))

    def _round(self, arm: Arm, model: Model, index: int) -> None:
        try:
            found = arm.measure(model, self._loads, seed=1000 * index)
        except PeerFailedError as error:
            if arm.name == OURS:
                raise
            self._skip(arm, str(error))
            return
        for load, rate in found.items():
            of_arm = self.rounds.setdefault(model.name, {}).setdefault(arm.name, {})
            of_arm.setdefault(load, []).append(rate)
            print(f"{model.name}, round {index}, {arm.name}: {load}: {rate:.1f} tok/s", file=sys.stderr)

    def _skip(self, arm: Arm, reason: str) -> None:
        self.skipped[arm.name] = reason
        print(f"{arm.name} is left out: {reason}", file=sys.stderr)


def summary(rates: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def figures(measurement: Measurement, loads: Loads, num_threads: int, num_rounds: int, torch_dtype: str) -> dict:
    medians = {
        model: {arm: {load: summary(rates) for load, rates in of_arm.items()} for arm, of_arm in arms.items()}
        for model, arms in measurement.rounds.items()
    }
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions({arm for arms in medians.values() for arm in arms}),
        "torch_dtype": torch_dtype,
        "num_threads": num_threads,
        "num_rounds": num_rounds,
        "loads": loads.names,
        "tokens_per_s": medians,
        "ratios": ratios(medians, goals(loads)),
        "skipped": measurement.skipped,
        "rounds": measurement.rounds,
    }


def versions(measured: set[str]) -> dict[str, str]:
    """Returns the versions of all that was measured. llama.cpp has that of the package that brings its source."""
    found = {"torch": importlib.metadata.version("torch")}
    for peer in sorted(measured):
        if peer in PINS:
            found[peer] = PINS[peer]
        elif peer.startswith("transformers"):
            found["transformers"] = importlib.metadata.version("transformers")
    return found


def ratios(medians: dict, wanted: dict[tuple[str, str], float]) -> list[dict]:
    """Returns Pagewire's median over each peer's, where both were measured, with the goal where there is one."""
    found = []
    for model, arms in medians.items():
        for peer in arms:
            for load, rates in arms[peer].items():
                if peer != OURS and load in arms.get(OURS, {}):
                    ratio = arms[OURS][load]["median"] / rates["median"]
                    entry = {"model": model, "load": load, "peer": peer, "ratio": ratio}
                    goal = wanted.get((load, peer))
                    found.append(entry if goal is None else {**entry, "goal": goal, "is_met": ratio >= goal})
    return found


def markdown(found: dict) -> str:
    """Returns a table for each model: a row for each load, a column for each arm that was measured."""
    facts = found["machine"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {found['num_threads']} threads each; {found['date']}; random bf16 "
        f"weights, with which vLLM and transformers compute in {found['torch_dtype']}. Tokens per second, medians of "
        f"{found['num_rounds']} runs (smallest to largest); in bold, how many times as fast Pagewire is."
    ]
    ratio = {(entry["model"], entry["load"], entry["peer"]): entry["ratio"] for entry in found["ratios"]}
    for model, arms in found["tokens_per_s"].items():
        columns = [name for name in (OURS, *PEERS) if name in arms]
        lines += ["", f"| {model} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for load in found["loads"]:
            cells = [_cell(arms[arm].get(load), ratio.get((model, load, arm))) for arm in columns]
            lines.append(f"| {load} | {' | '.join(cells)} |")
    lines += [f"\nNot measured: {name} ({reason})." for name, reason in found["skipped"].items()]
    return "\n".join(lines)


def _cell(rates: dict[str, float] | None, ratio: float | None) -> str:
    if rates is None:
        return "–"
    text = f"{rates['median']:,.0f} ({rates['min']:,.0f}–{rates['max']:,.0f})"
    return text if ratio is None else f"{text} **{ratio:.2f}**"


def report_goals(found: dict) -> None:
    for entry in found["ratios"]:
        if "goal" in entry:
            verdict = "met" if entry["is_met"] else "MISSED"
            comparison = f"{entry['model']}, {entry['load']}: {entry['ratio']:.2f} x {entry['peer']}"
            print(f"{comparison} (goal: at least {entry['goal']:g}: {verdict})", file=sys.stderr)


def draw(found: dict, path: Path) -> None:
    """Draws bars of every load, a row of panels for each model. Does nothing without matplotlib, which is an extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed (the extra `bench`)", file=sys.stderr)
        return
    tables = found["tokens_per_s"]
    size = (3.2 * len(found["loads"]), 2.8 * len(tables))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(tables), len(found["loads"]), squeeze=False)
    for row, (model, arms) in zip(panels, tables.items(), strict=True):
        for axes, load in zip(row, found["loads"], strict=True):
            names = [name for name in (OURS, *PEERS) if load in arms.get(name, {})]
            rates = [arms[name][load] for name in names]
            medians = [rate["median"] for rate in rates]
            below = [rate["median"] - rate["min"] for rate in rates]
            above = [rate["max"] - rate["median"] for rate in rates]
            axes.barh(names, medians, xerr=[below, above], color=["C0" if n == OURS else "C7" for n in names])
            axes.invert_yaxis()
            axes.set_title(f"{model}: {load}", fontsize="small")
            axes.set_xlabel("tok/s", fontsize="small")
    figure.savefig(path, dpi=120)


def arms(num_threads: int, environments: Environments, dtype: str) -> list[Arm]:
    # As much memory for its KV cache as a worker of ours takes by default.
    flags = ["--dtype", dtype, "--kv-cache-memory", str(cpu_cache_bytes(available_bytes()))]
    vllm = ProgramArm("vLLM", "vllm_peer.py", flags, num_threads, environments.vllm)
    return [
        PagewireArm(num_threads),
        LlamaCppArm(environments, num_threads),
        vllm,
        *transformers_arms(num_threads, dtype),
    ]


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pagewire" / "bench" / "peers"
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Pagewire beside its peers.")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="shapes (default: all)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="whom to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument("--environments", type=Path, default=cache, help=f"the peers' environments (default: {cache})")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.json", help="raw numbers; the chart beside it")
    arguments = parser.parse_args()
    environments = Environments(arguments.environments)
    dtype = str(choose_dtype("auto", "bfloat16", torch.device("cpu"))).removeprefix("torch.")
    chosen = [arm for arm in arms(arguments.num_threads, environments, dtype) if arm.name in (OURS, *arguments.peers)]
    models = [Model(f"{name} shape", random_checkpoint(name), SHAPES[name]["vocab_size"]) for name in arguments.models]
    loads = Loads()
    measurement = Measurement(chosen, loads)
    try:
        measurement.measure(models, arguments.rounds)
    except KeyboardInterrupt:
        print("interrupted: the figures are those of what was measured until then", file=sys.stderr)
    except PeerFailedError as error:
        sys.exit(f"{OURS} failed: {error}")
    if not measurement.rounds:
        sys.exit("nothing was measured")
    found = figures(measurement, loads, arguments.num_threads, arguments.rounds, dtype)
    write(arguments.output, found)
    draw(found, arguments.output.with_suffix(".png"))
    report_goals(found)
    print(markdown(found))


if __name__ == "__main__":
    main()
