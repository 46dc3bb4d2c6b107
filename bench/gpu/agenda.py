"""Uses a few minutes of GPU time well: runs the parts that are missing or stale, the most informative first.

    python -m bench agenda --budget 600       # make gpu-next BUDGET=600
    python -m bench agenda --budget 0         # lists missing and stale parts; needs no GPU

Each part runs in its own process with a time limit, so that a hang or a crash affects only this part. Results are
written as they arrive, to bench/results/gpu_COMMAND.CARD.json, each with the commit and a digest of the measured
source. A run that is interrupted, or exceeds its budget within a part, continues there the next time. In a copy of the
tree without history, PAGEWIRE_COMMIT names the commit. With --device cpu and an --output folder, the run is a
rehearsal.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import parser_of
from testing import ledger
from testing.kernel_checks import MODULES
from testing.ledger import State
from testing.record import RESULTS

START_SECONDS = 10.0  # start-up time of a part's process, before its first case
# a part may run for the larger of this many seconds and this multiple of its expected time
MIN_SECONDS, LIMIT_FACTOR = 90.0, 3.0
NUM_JOBS = {"check": 4}  # number of parallel processes, if not 1
MIN_LEFT = 15.0  # minimum seconds of the budget that must remain to start a part


@dataclass(frozen=True)
class Entry:
    """A part of one of the commands.

    Attributes:
        command: a key of RUNNERS.
        part: the name of the part within its command.
        seconds: the expected time of all its cases, until it has been measured.
    """

    command: str
    part: str
    seconds: float

    def pending(self, folder: Path, card: str) -> "Pending":
        """Return the state of the part, and its expected seconds.

        The expectation is the duration of the last complete run, or the estimate if there was no complete run.
        """
        part = ledger.parts_of(ledger.path_of(self.command, card, folder)).get(self.part)
        state, seconds = ledger.state(part, ledger.digest_of(self.part)), self.seconds
        if part is not None and part.get("is_complete", True):
            taken = sum(result.get("wall_seconds", 0.0) for result in part["results"])
            seconds = START_SECONDS + taken / NUM_JOBS.get(self.command, 1)
        return Pending(self, state, seconds)


# For each command, the module and the name of the function that runs its parts. The modules import torch, which a
# listing does not need.
RUNNERS = {
    "kernels_bench": ("bench.gpu.kernels", "run_modules"),
    "speed": ("bench.gpu.speed", "run_all"),
    "kernels_check": ("tests.gpu.check_kernels", "run_checks"),
    "check": ("tests.gpu.check", "run_checks"),
}
Run = Callable[..., int]


def _kernels(command: str, seconds: float, *names: str) -> list[Entry]:
    return [Entry(command, f"testing.kernel_checks.{name}", seconds) for name in names]


# The most informative parts come first.
ENTRIES = [
    Entry("kernels_bench", "device", 15),
    *_kernels("kernels_bench", 40, "prefill_attention"),
    Entry("speed", "step_tables_small", 45),
    Entry("speed", "first_token_small", 40),
    Entry("speed", "first_token_large", 60),
    Entry("speed", "serving_small", 90),
    *_kernels("kernels_bench", 40, "linear", "experts", "sampler", "fused"),
    *_kernels("kernels_bench", 60, "scaled"),
    Entry("speed", "step_tables_large", 60),
    Entry("speed", "serving_large", 120),
    Entry("speed", "peer", 150),
    Entry("kernels_bench", "bench.gpu.products", 240),
    Entry("speed", "peer_steps_small", 240),
    Entry("speed", "peer_steps_large", 300),
    *_kernels("kernels_check", 60, *(module.rpartition(".")[2] for module in MODULES)),
    *(Entry("check", part, 90) for part in ("kills", "parity", "graphs", "sampling", "bfloat16", "quantized", "swap")),
    *(Entry("speed", part, 40) for part in ("decode_small", "decode_large", "throughput", "idle", "swap")),
    *_kernels("kernels_bench", 40, "decode_attention", "cache", "blocks", "gathering", "states"),
    *(Entry("check", part, 90) for part in ("small_parity", "depth", "fp8", "backends", "ranks", "device_tests")),
]


@dataclass(frozen=True)
class Pending:
    entry: Entry
    state: State
    seconds: float


def pending(entries: Sequence[Entry], folder: Path, card: str) -> list[Pending]:
    """Return the entries that are not current, in this order: interrupted, never measured, stale, failed."""
    found = [each.pending(folder, card) for each in entries]
    return sorted((each for each in found if each.state is not State.CURRENT), key=lambda each: each.state)


def line(each: Pending) -> str:
    return f"{each.state.name.lower():8} {each.seconds:5.0f} s  {each.entry.command:13} {each.entry.part}"


def run_entries(entries: Sequence[Entry], device: str, folder: Path, card: str, budget: float, run: Run) -> int:
    """Run pending entries until the budget is spent, and print the remaining ones. Return 1 if an entry failed, else 0.

    An interrupted entry is resumed first. Entries that fit into the remaining budget run before entries that do not
    fit. If only the latter remain, the first of them is started and paused when the budget ends.
    """
    ends_at, status = time.monotonic() + budget, 0
    left = pending(entries, folder, card)
    while left and (remaining := ends_at - time.monotonic()) > MIN_LEFT:
        each = next((each for each in left if each.state is State.STARTED or each.seconds <= remaining), left[0])
        left.remove(each)
        limit = max(MIN_SECONDS, LIMIT_FACTOR * each.seconds)
        print(f"== {line(each)}; {remaining:.0f} s are left", flush=True)
        status |= run(each.entry, device, folder, card, limit, ends_at)
    print_list(pending(entries, folder, card))
    return status


def run_entry(entry: Entry, device: str, folder: Path, card: str, limit: float, pause_at: float) -> int:
    import torch

    from testing.part import Report, describe

    module, name = RUNNERS[entry.command]
    path = ledger.path_of(entry.command, card, folder)
    report = Report(path, describe(torch.device(device)), [entry.part], resumes=True)
    run: Run = getattr(importlib.import_module(module), name)
    return run([entry.part], device, report, limit, pause_at)


def print_list(left: Sequence[Pending]) -> None:
    print(
        "\n".join([*map(line, left), f"{len(left)} parts are left, about {sum(each.seconds for each in left):.0f} s"])
    )


def _card_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the name of the card that runs, or for a listing, of the card that was measured last."""
    if options.device == "cpu":
        return "cpu"
    if options.budget > 0:
        import torch

        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA device; run this on a machine that has one, or list with --budget 0")
        return torch.cuda.get_device_name()
    files = map(ledger.parts_of, options.output.glob("gpu_*.json"))
    parts = [part for file in files for part in file.values()]
    return options.card or max(parts, key=lambda part: part["date"], default={"card": "none"})["card"]


def main(flags: Sequence[str]) -> int:
    parser = parser_of("agenda", __doc__)
    parser.add_argument("--budget", type=float, default=0, help="seconds; 0: list what is missing (default)")
    parser.add_argument("--parts", nargs="+", help="parts to run or list (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--card", help="the card whose results are listed (default: the card measured last)")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(flags)
    if options.device == "cpu" and options.output == RESULTS:
        parser.error("a run on a CPU is a rehearsal: specify a folder for its results with --output")
    unknown = sorted(set(options.parts or ()) - {entry.part for entry in ENTRIES})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; --budget 0 lists the parts")
    entries = [entry for entry in ENTRIES if not options.parts or entry.part in options.parts]
    card = _card_of(options, parser)
    print(f"card: {card}")
    if options.budget <= 0:
        print_list(pending(entries, options.output, card))
        return 0
    return run_entries(entries, options.device, options.output, card, options.budget, run_entry)
