"""Runs the same models and loads through Pagewire and its peers on this machine, in several weight formats.

    python -m bench peers

Pagewire runs as both services, over gRPC. Each arm starts, warms up, is measured and ends before the next arm begins.
The order of the arms is reversed in every round. In bf16 all arms use the same checkpoint. In the other formats
Pagewire, llama.cpp and mistral.rs use the same file, quantised by llama.cpp's own program. Peers based on torch use the
dtype that the worker chooses on this machine.

Figures are medians of the rounds, with minimum and maximum. A peer that is not available is left out, and the reason is
printed. The raw numbers are written to bench/results/ after each round, under the name of the instruction set, with a
chart next to them. Tables for the README are printed to standard output.
"""

import argparse
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from bench.checkpoint import EXPERT_SHAPES, SHAPES, STATE_SHAPES, random_checkpoint
from bench.peers.arms import (
    QUICK,
    Arm,
    LlamaCppArm,
    Loads,
    MistralRsArm,
    Model,
    PagewireArm,
    PeerFailedError,
    ProgramArm,
    transformers_arms,
)
from bench.peers.environment import (
    AVX2,
    FORMATS,
    LLAMA_CPP_PYTHON,
    MISTRAL_RS,
    NATIVE,
    VLLM,
    CannotMakeError,
    Environments,
    default_root,
)
from bench.peers.speedups import goal
from bench.peers.tables import OURS, PEERS, draw, markdown, report_buffers, report_goals
from bench.report import parser_of
from testing.record import RESULTS, machine, write
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import choose_dtype
from worker_service.startup.pool_size import cpu_cache_bytes
from worker_service.startup.resources import available_bytes

PINS = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP_PYTHON, "mistral.rs": MISTRAL_RS}
# Environment variables that restrict our processes to AVX2, in torch and in our kernels.
AVX2_ENVIRON = {
    "PAGEWIRE_CPU_KERNELS": "require",
    "PAGEWIRE_CPU_VARIANT": AVX2,
    "ATEN_CPU_CAPABILITY": AVX2,
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
# Peers whose threads spin while they wait for each other slow down disproportionately if another process uses a core.
BUSY_LOAD = 0.5
BUILT_FOR_AVX2 = (OURS, LlamaCppArm.name)


class Measurement:
    """The available arms, and their results in each round."""

    def __init__(self, arms: Sequence[Arm], loads: Loads) -> None:
        self._arms = list(arms)
        self._loads = loads
        self.skipped: dict[str, str] = {}
        # By model, format, arm and load: a rate for each round.
        self.rounds: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}

    def measure(self, models: Sequence[Model], num_rounds: int, keep: Callable[[], None] = lambda: None) -> None:
        """Measure models, each of which has one format. `keep` is called after each round of a shape."""
        for model in models:
            for arm in self._left(model):
                try:
                    arm.prepare(model)
                except CannotMakeError as error:
                    self._skip(arm, model, str(error))
        for name in dict.fromkeys(model.name for model in models):
            of_shape = [model for model in models if model.name == name]
            for index in range(num_rounds):
                for model in of_shape if index % 2 == 0 else of_shape[::-1]:
                    self._round(model, index, num_rounds)
                if self.rounds:
                    keep()

    def _left(self, model: Model) -> Iterator[Arm]:
        """Yield the arms that support the model's format and have not failed with it."""
        for arm in self._arms:
            if model.weight_format in arm.formats and _label(arm, model) not in self.skipped:
                yield arm

    def _round(self, model: Model, index: int, num_rounds: int) -> None:
        left = list(self._left(model))
        for arm in left if index % 2 == 0 else left[::-1]:
            what = f"{model.name}, {model.weight_format}, round {index + 1} of {num_rounds}, {arm.name}"
            print(f"{what} ...", file=sys.stderr, flush=True)
            try:
                found = arm.measure(model, self._loads, seed=1000 * index)
            except PeerFailedError as error:
                if arm.name == OURS:
                    raise PeerFailedError(f"{model.name}, {model.weight_format}: {error}") from None
                self._skip(arm, model, str(error))
                continue
            for load, rate in found.items():
                of_format = self.rounds.setdefault(model.name, {}).setdefault(model.weight_format, {})
                of_format.setdefault(arm.name, {}).setdefault(load, []).append(rate)
                print(f"{what}: {load}: {rate:.1f} tok/s", file=sys.stderr, flush=True)

    def _skip(self, arm: Arm, model: Model, reason: str) -> None:
        self.skipped[_label(arm, model)] = reason
        print(f"{_label(arm, model)} is left out: {reason}", file=sys.stderr)


def _label(arm: Arm, model: Model) -> str:
    """Return the name of the unit that is left out if an arm fails: the arm, or one of its formats if it has
    several."""
    return arm.name if len(arm.formats) == 1 else f"{arm.name}, {model.weight_format}"


def summary(rates: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def figures(measurement: Measurement, loads: Loads, isa: str, facts: dict) -> dict:
    """Return the complete record of a run. `facts` about the run are included unchanged."""
    medians = {
        model: {
            name: {arm: {load: summary(rates) for load, rates in of_arm.items()} for arm, of_arm in arms.items()}
            for name, arms in _in_order(formats).items()
        }
        for model, formats in measurement.rounds.items()
    }
    measured = {arm for formats in medians.values() for arms in formats.values() for arm in arms}
    return {
        "date": date.today().isoformat(),
        "machine": machine(),
        "isa": isa,
        "versions": versions(measured),
        **facts,
        "loads": loads.names,
        "tokens_per_s": medians,
        "ratios": ratios(medians, loads, isa),
        "skipped": measurement.skipped,
        "rounds": measurement.rounds,
    }


def _in_order(formats: dict) -> dict:
    return {name: formats[name] for name in FORMATS if name in formats}


def versions(measured: set[str]) -> dict[str, str]:
    """Return the versions of all measured programs. llama.cpp's version is the version of the package with its
    source."""
    found = {"torch": importlib.metadata.version("torch")}
    for peer in sorted(measured):
        if peer in PINS:
            found[peer] = PINS[peer]
        elif peer.startswith("transformers"):
            found["transformers"] = importlib.metadata.version("transformers")
    return found


def ratios(medians: dict, loads: Loads, isa: str) -> list[dict]:
    """Return Pagewire's median divided by each peer's, if both were measured, with the goal if one is set."""
    found = []
    for model, formats in medians.items():
        for name, arms in formats.items():
            ours = arms.get(OURS, {})
            pairs = [(peer, load) for peer in arms if peer != OURS for load in arms[peer] if load in ours]
            for peer, load in pairs:
                ratio = ours[load]["median"] / arms[peer][load]["median"]
                entry = {"model": model, "format": name, "load": load, "peer": peer, "ratio": ratio}
                least = goal(loads, isa, model, name, peer, load)
                found.append(entry if least is None else {**entry, "goal": least, "is_met": ratio >= least})
    return found


def arms(num_threads: int, environments: Environments, dtype: str) -> list[Arm]:
    vllm = ProgramArm("vLLM", "vllm_peer.py", lambda: vllm_flags(dtype), num_threads, environments.vllm)
    return [
        PagewireArm(environments, num_threads),
        LlamaCppArm(environments, num_threads),
        MistralRsArm(environments, num_threads),
        vllm,
        *transformers_arms(num_threads, dtype),
    ]


def vllm_flags(dtype: str) -> list[str]:
    """Return the flags of vLLM, which give it the same KV cache memory as our worker uses by default.

    This memory is a share of the memory that is free now. By default, vLLM requires a share of all memory, used or not.
    """
    return ["--dtype", dtype, "--kv-cache-memory", str(cpu_cache_bytes(available_bytes()))]


def choose_arms(arguments: argparse.Namespace, dtype: str) -> tuple[list[Arm], dict[str, str]]:
    """Return the requested arms, and the reasons, by name, why other requested arms are left out."""
    asked = arms(arguments.num_threads, Environments(arguments.environments, arguments.isa), dtype)
    asked = [arm for arm in asked if arm.name in (OURS, *arguments.peers)]
    if arguments.isa == NATIVE:
        return asked, {}
    left_out = {arm.name: "it cannot be built for AVX2 alone" for arm in asked if arm.name not in BUILT_FOR_AVX2}
    return [arm for arm in asked if arm.name in BUILT_FOR_AVX2], left_out


def compute_with() -> tuple[str, str]:
    """Return the instruction set of our kernels, or "torch" without kernels, and the worker's dtype for bf16 weights.

    Raises ValueError if the environment requires an unavailable configuration.
    """
    kernels = load_cpu_kernels()
    dtype = choose_dtype("auto", "bfloat16", torch.device("cpu"), kernels)
    return "torch" if kernels is None else kernels.variant, str(dtype).removeprefix("torch.")


def results_path(isa: str, shapes: Sequence[str], formats: Sequence[str]) -> Path:
    """Return the path for the raw numbers. A run of some shapes or formats does not overwrite a run of all."""
    some = [*(shapes if set(shapes) != set(SHAPES) else ()), *(formats if set(formats) < set(FORMATS) else ())]
    return RESULTS / f"{'_'.join(['peers', *some])}.{isa}.json"


def load_before() -> float:
    """Return the load average of the last minute, and print a warning if the machine is too busy to measure."""
    load = round(os.getloadavg()[0], 2)
    if load > BUSY_LOAD:
        print(f"the machine is busy (load average {load}): figures and ratios are unreliable", file=sys.stderr)
    return load


def parse_arguments(flags: Sequence[str]) -> argparse.Namespace:
    cache = default_root()
    parser = parser_of("peers", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*SHAPES, *EXPERT_SHAPES, *STATE_SHAPES],
        default=list(SHAPES),
        help=f"shapes (default: {' '.join(SHAPES)}; shapes with experts are slow and need 10 GB of disk)",
    )
    parser.add_argument(
        "--depths", nargs="*", type=int, default=[], help="decode one stream after prompts of these lengths, too"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="weight formats (default: all)"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="peers to measure (default: all)"
    )
    parser.add_argument(
        "--isa",
        choices=(NATIVE, AVX2),
        default=NATIVE,
        help="the instruction set of both sides: this machine's (default), or AVX2 alone, with llama.cpp as the peer",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each arm (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="short prompts and outputs, and no mixed requests: much less time"
    )
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all cores)")
    parser.add_argument("--environments", type=Path, default=cache, help=f"the peers' environments (default: {cache})")
    parser.add_argument(
        "--output",
        type=Path,
        help="file for raw numbers, with the chart next to it (default: bench/results/peers.ISA.json)",
    )
    arguments = parser.parse_args(flags)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def main(flags: Sequence[str]) -> None:
    arguments = parse_arguments(flags)
    if arguments.isa == AVX2:
        os.environ.update(AVX2_ENVIRON)
    try:
        isa, dtype = compute_with()
    except ValueError as error:
        sys.exit(f"Pagewire's kernels: {error}")
    all_shapes = SHAPES | EXPERT_SHAPES | STATE_SHAPES
    shapes = [
        Model(f"{name} shape", random_checkpoint(name), all_shapes[name]["vocab_size"]) for name in arguments.models
    ]
    models = [replace(shape, weight_format=name) for shape in shapes for name in arguments.formats]
    load_average = load_before()
    chosen, left_out = choose_arms(arguments, dtype)
    loads = replace(QUICK if arguments.quick else Loads(), depths=tuple(arguments.depths))
    measurement = Measurement(chosen, loads)
    measurement.skipped.update(left_out)
    path = arguments.output or results_path(isa, arguments.models, arguments.formats)

    def found() -> dict:
        buffers = next((arm.buffers for arm in chosen if isinstance(arm, LlamaCppArm)), {})
        facts: dict = {"torch_dtype": dtype, "num_threads": arguments.num_threads, "num_rounds": arguments.rounds}
        facts |= {"load_average_before": load_average, "llama_cpp_buffers": buffers}
        return figures(measurement, loads, isa, facts)

    failure = ""
    try:
        measurement.measure(models, arguments.rounds, keep=lambda: write(path, found()))
    except KeyboardInterrupt:
        print("interrupted: the figures include only the completed measurements", file=sys.stderr)
    except PeerFailedError as error:
        failure = f"{OURS} failed: {error}"
    if not measurement.rounds:
        sys.exit(failure or "nothing was measured")
    finish(found(), path)
    if failure:
        sys.exit(failure)


def finish(found: dict, path: Path) -> None:
    """Write the figures, draw the chart, and print the tables."""
    write(path, found)
    draw(found, path.with_suffix(".png"))
    report_buffers(found["llama_cpp_buffers"])
    report_goals(found)
    print(markdown(found))
