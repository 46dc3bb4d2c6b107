"""Measures the KV cache of models with windows: bytes of a sequence, requests at once, and prefix cache hits.

    python -m bench windows

1. Bytes that a sequence of 32,768 tokens holds: by the core's block pool, and by the resident memory of a worker
   process. The goal is the formula of docs/models.md. A pool with unused blocks keeps what can be a prefix cache hit,
   so that the goal applies to a worker without prefix caching.
2. The requests of 32,768 tokens that run to their ends at once, without preemption, in the bytes that eight of them
   need if every layer keeps all positions. They are compared with one group of layers in the same bytes.
3. The prompt tokens that eight conversations in turn compute, relative to a model without windows. Both pools hold the
   same number of tokens, of which the conversations occupy 25 %, 50 % or 90 %.

The core runs with a worker that computes nothing. The worker processes compute small models with the attention of the
real ones. The raw numbers are written to bench/results/windows.json, or with `--only` to a file of the part.
"""

import argparse
import mmap
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.core.quick_worker import EPOCH, CoreRun, QuickWorker, checking_worker
from bench.core.windowed_shapes import (
    BLOCK_SIZE,
    EXAONE_4,
    GEMMA_3,
    GPT_OSS,
    MAX_NUM_BATCHED_TOKENS,
    SMALL_EXAONE_4,
    SMALL_GPT_OSS,
    VOCAB_SIZE,
    Layout,
    Shape,
)
from bench.goals import verdict
from scheduler_service.core.scheduler_options import SchedulerOptions
from worker_service.config import WorkerConfig
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import load_worker

PAGE_BYTES = mmap.PAGESIZE
LENGTH, NUM_DECODED = 32768, 64
MAX_MODEL_LEN = LENGTH + NUM_DECODED
GOAL_BYTES, GOAL_COMPUTED = 1.1, 1.1
NUM_FULL = 8  # sequences whose bytes are the budget
OUTPUT_LENGTH = 2048  # longer than the steps in which all prompts are computed, so that the requests run at once
GOALS_AT_ONCE = {GEMMA_3.name: 4.0, GPT_OSS.name: 1.8}
NUM_CONVERSATIONS, NUM_TURNS = 8, 6
SYSTEM_LENGTH, USER_LENGTHS, ANSWER_LENGTHS = 2000, (50, 400), (50, 200)
CONVERSATION_MODEL_LEN = 8192
SHARES = (0.25, 0.5, 0.9)
POLICIES = (("agent", "lru"), ("agent", "learned"), ("fcfs", "lru"))


def tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=length))


# Bytes


@dataclass(frozen=True, slots=True)
class Mode:
    """Options that change how many blocks a sequence holds."""

    name: str
    caches: bool
    num_step_tokens: int

    @property
    def options(self) -> SchedulerOptions:
        return SchedulerOptions(max_num_batched_tokens=self.num_step_tokens, enable_prefix_caching=self.caches)


MODES = (
    Mode("steps of 2,048 tokens", False, 2048),
    Mode("steps of 512 tokens", False, 512),
    Mode("prefix caching", True, 2048),
)


# Of each shape that a worker computes, the modes. The whole models would take too long.
COMPUTED = {GEMMA_3: MODES, SMALL_GPT_OSS: MODES[:2], SMALL_EXAONE_4: MODES[:2]}


def held_by_pool(shape: Shape, mode: Mode) -> dict[str, float]:
    """Return the bytes of the blocks that a sequence holds in the core: at the end of its prompt, and at most."""
    layout = shape.grouped(MAX_MODEL_LEN)
    capacity = layout.capacity(40_000, MAX_MODEL_LEN, 4, mode.num_step_tokens)
    run = CoreRun(capacity, mode.options, QuickWorker(VOCAB_SIZE))
    run.add(tokens(random.Random(0), LENGTH), NUM_DECODED)
    peak, outputs = 0, run.step()
    while not outputs.token_ids:
        peak = max(peak, run.stats.num_held_blocks)
        outputs = run.step()
    return {"end": run.stats.num_held_blocks * layout.block_bytes, "peak": peak * layout.block_bytes}


def held_by_process(shape: Shape, mode: Mode) -> dict[str, float]:
    """Return the bytes by which a sequence makes a worker process grow: in the storage of the KV cache, and elsewhere.

    Run this in a process of its own. The KV cache has twice the blocks that the sequence would need without windows.
    """
    layout = shape.grouped(MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as name:
        config = WorkerConfig(
            model=str(shape.write_config(Path(name))),
            device="cpu",
            load_format="dummy",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=mode.num_step_tokens,
            num_device_blocks=2 * shape.full_bytes(LENGTH) // layout.block_bytes,
            num_host_blocks=0,
        )
        worker = load_worker(config, "bench")
    groups = [(group.sliding_window, group.num_layers) for group in worker.ready.layer_groups]
    assert (groups, worker.ready.block_bytes) == (layout.sizes, layout.block_bytes)
    storage = worker.runner._cache.storage
    run = CoreRun(worker.ready, mode.options, worker.runner)
    worker.runner.reset(EPOCH)
    run.add(tokens(random.Random(1), 2 * mode.num_step_tokens), 4)  # allocates the buffers of a step
    while not run.is_idle:
        run.step()
    run.scheduler.flush_cache(run.now)
    elsewhere = resident_bytes() - touched_bytes(storage)
    run.add(tokens(random.Random(0), LENGTH), NUM_DECODED)
    while not run.step().token_ids:
        pass
    touched = touched_bytes(storage)
    return {"storage": touched, "elsewhere": resident_bytes() - touched - elsewhere}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def touched_bytes(storage: torch.Tensor) -> int:
    """Return the bytes of a tensor that are resident, because something has been written to their pages."""
    first, last = storage.data_ptr() // PAGE_BYTES, (storage.data_ptr() + storage.nbytes) // PAGE_BYTES
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), dtype=np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE_BYTES


def measure_bytes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shape in (SMALL_GPT_OSS, SMALL_EXAONE_4, GEMMA_3, GPT_OSS, EXAONE_4):
        layout = shape.grouped(MAX_MODEL_LEN)
        found[shape.name] = of_shape = {
            "formula": shape.formula_bytes(LENGTH),
            "full_attention": shape.full_bytes(LENGTH),
            "groups": layout.sizes,
            "block_bytes": layout.block_bytes,
            "modes": {mode.name: held_by_pool(shape, mode) for mode in MODES},
        }
        for mode in COMPUTED.get(shape, ()):
            with ProcessPoolExecutor(1, get_context("spawn")) as processes:
                of_shape["modes"][mode.name] |= processes.submit(held_by_process, shape, mode).result()
            print(f"{shape.name}, {mode.name}: {of_shape['modes'][mode.name]}", flush=True)
    return found


# Requests at once


def runs_at_once(layout: Layout, num_blocks: int, num_requests: int) -> bool:
    """Return whether this number of requests runs at once, and to the ends, without preemption."""
    capacity = layout.capacity(num_blocks, MAX_MODEL_LEN, num_requests)
    options = SchedulerOptions(max_num_seqs=num_requests, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)
    run = CoreRun(capacity, options, QuickWorker(VOCAB_SIZE))
    rng = random.Random(0)
    for _ in range(num_requests):
        run.add(tokens(rng, LENGTH - OUTPUT_LENGTH), OUTPUT_LENGTH)
    most = 0
    while not run.is_idle:
        run.step()
        stats = run.stats
        most = max(most, stats.num_running)
        if stats.num_preemptions:
            return False
    return most == num_requests


def most_at_once(layout: Layout, num_bytes: int) -> int:
    num_blocks = num_bytes // layout.block_bytes
    fits, exceeds = 1, num_blocks * BLOCK_SIZE // LENGTH + 2
    assert runs_at_once(layout, num_blocks, fits)
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if runs_at_once(layout, num_blocks, middle):
            fits = middle
        else:
            exceeds = middle
    return fits


def measure_at_once() -> dict[str, Any]:
    found = {}
    for shape in (GEMMA_3, GPT_OSS, EXAONE_4):
        num_bytes = NUM_FULL * shape.full_bytes(LENGTH)
        before = most_at_once(shape.ungrouped(), num_bytes)
        now = most_at_once(shape.grouped(MAX_MODEL_LEN), num_bytes)
        by_formula = num_bytes // shape.formula_bytes(LENGTH)
        found[shape.name] = {"bytes": num_bytes, "before": before, "now": now, "by_formula": by_formula}
        print(f"{shape.name}: {found[shape.name]}", flush=True)
    return found


# Conversations


@dataclass(frozen=True, slots=True)
class Turn:
    user: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations that share a system prompt and take turns, one after another."""

    system: tuple[int, ...]
    conversations: tuple[tuple[Turn, ...], ...]
    drops_thoughts: bool  # the next prompt has only the second half of an answer

    @classmethod
    def drawn(cls, seed: int, *, drops_thoughts: bool) -> "Load":
        rng = random.Random(seed)
        turns = tuple(
            tuple(Turn(tokens(rng, rng.randint(*USER_LENGTHS)), rng.randint(*ANSWER_LENGTHS)) for _ in range(NUM_TURNS))
            for _ in range(NUM_CONVERSATIONS)
        )
        return cls(tokens(rng, SYSTEM_LENGTH), turns, drops_thoughts)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are computed for all conversations. The system prompt counts once."""
        return len(self.system) + sum(
            len(turn.user) + turn.num_output_tokens for turns in self.conversations for turn in turns
        )

    def converse(self, run: CoreRun) -> dict[str, int]:
        """Let the conversations take turns. Return the numbers of prompt tokens."""
        histories = [self.system] * NUM_CONVERSATIONS
        for i in range(NUM_TURNS):
            for j, turns in enumerate(self.conversations):
                histories[j] += turns[i].user
                run.add(histories[j], turns[i].num_output_tokens)
                output: list[int] = []
                while not run.is_idle:
                    output += run.step().token_ids
                histories[j] += tuple(output[len(output) // 2 if self.drops_thoughts else 0 :])
        stats = run.stats
        num_computed = stats.num_prompt_tokens - stats.num_cached_prompt_tokens
        return {"prompt_tokens": stats.num_prompt_tokens, "computed": num_computed, "preempted": stats.num_preemptions}


def pools(shape: Shape, num_tokens: int, share: float) -> dict[str, tuple[Layout, int]]:
    """Return the layouts and the numbers of blocks to compare. The first is the model without windows, in a pool of
    which `num_tokens` tokens occupy the given share.

    The others are the model with layer groups, in pools of the same number of tokens by several definitions:
    - formula: the formula's blocks for eight sequences that fill the first pool together
    - share: the conversations occupy the same share of the formula's blocks
    - full groups + 10 %: a tenth more blocks than the groups without a window need. It has no room for eight windows if
      the share is 50 % or more.
    - same bytes
    """
    full, grouped = shape.ungrouped(), shape.grouped(CONVERSATION_MODEL_LEN)
    pool_tokens = int(num_tokens / share)
    num_full, num_windows = pool_tokens // BLOCK_SIZE, len(grouped.windows) - grouped.windows.count(0)
    window_blocks = NUM_CONVERSATIONS * num_windows * (max(grouped.windows) // BLOCK_SIZE)
    return {
        "full attention": (full, num_full),
        "formula": (grouped, NUM_CONVERSATIONS * grouped.num_blocks(pool_tokens // NUM_CONVERSATIONS)),
        "share": (grouped, int((num_tokens // BLOCK_SIZE + window_blocks) / share)),
        "full groups + 10 %": (grouped, int(1.1 * grouped.windows.count(0) * num_full)),
        "same bytes": (grouped, num_full * full.block_bytes // grouped.block_bytes),
    }


def measure_conversations(num_seeds: int, *, checked: bool) -> dict[str, Any]:
    """Return the runs of each pool, by the kind of conversation, the share and the policy."""
    found: dict[str, Any] = {}
    for drops_thoughts, share, policy in product((False, True), SHARES, POLICIES):
        figures: dict[str, Any] = {}
        for seed in range(num_seeds):
            load = Load.drawn(seed, drops_thoughts=drops_thoughts)
            for name, (layout, num_blocks) in pools(GEMMA_3, load.num_tokens, share).items():
                capacity = layout.capacity(num_blocks, CONVERSATION_MODEL_LEN, NUM_CONVERSATIONS)
                worker = checking_worker(capacity) if checked else QuickWorker(VOCAB_SIZE)
                options = SchedulerOptions(policy=policy[0], retention=policy[1])
                sizes = {"blocks": num_blocks, "bytes": num_blocks * layout.block_bytes}
                figures.setdefault(name, []).append(sizes | load.converse(CoreRun(capacity, options, worker)))
        kind = "thoughts dropped" if drops_thoughts else "whole answers kept"
        found[f"{kind}, {share:.0%}, {' '.join(policy)}"] = figures
        print(f"{list(found)[-1]}: {[sum_of(runs, 'computed') for runs in figures.values()]}", flush=True)
    return found


def sum_of(runs: list[dict[str, int]], key: str) -> int:
    return sum(run[key] for run in runs)


# The benchmark

PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "bytes": lambda arguments: measure_bytes(),
    "requests": lambda arguments: measure_at_once(),
    "conversations": lambda arguments: measure_conversations(arguments.seeds, checked=arguments.checked),
}


def measure(arguments: argparse.Namespace) -> dict:
    kernels = load_cpu_kernels()
    names = [arguments.only] if arguments.only else list(PARTS)
    load = {"length": LENGTH, "block_size": BLOCK_SIZE, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    found = {name: PARTS[name](arguments) for name in names}
    return {"variant": kernels.variant if kernels else "torch", "load": load, **found}


def report(figures: dict) -> None:
    for name, show in (("bytes", report_bytes), ("requests", report_at_once), ("conversations", report_conversations)):
        if name in figures:
            show(figures[name])


def report_bytes(found: dict[str, Any]) -> None:
    print(f"MiB of a sequence of {LENGTH:,} tokens; in brackets: relative to the formula")
    for name, of_shape in found.items():
        formula = of_shape["formula"]
        whole = of_shape["full_attention"] / formula
        print(f"  {name}: formula {formula / 2**20:,.0f}; all positions in all layers ({whole:.2f})")
        for mode, sizes in of_shape["modes"].items():
            texts = [f"{key} {size / 2**20:,.0f} ({size / formula:.3f})" for key, size in sizes.items()]
            judged = sizes.get("storage", sizes["end"]) / formula
            print(f"    {mode:22}: {', '.join(texts)} {verdict(judged, GOAL_BYTES, at_least=False)}")


def report_at_once(found: dict[str, Any]) -> None:
    print(f"requests of {LENGTH:,} tokens at once in the bytes of {NUM_FULL} without windows")
    for name, row in found.items():
        ratio = row["now"] / row["before"]
        goal = verdict(ratio, GOALS_AT_ONCE[name], at_least=True) if name in GOALS_AT_ONCE else ""
        print(
            f"  {name:14} {row['bytes'] / 2**30:6.1f} GiB: {row['before']} before, {row['now']} now "
            f"({row['by_formula']} by the formula): {ratio:.2f} times {goal}"
        )


def report_conversations(found: dict[str, Any]) -> None:
    print(f"{NUM_CONVERSATIONS} conversations in turn, {NUM_TURNS} turns: prompt tokens computed")
    for name, figures in found.items():
        full = sum_of(figures["full attention"], "computed")
        print(f"  {name}: {full:,} of {sum_of(figures['full attention'], 'prompt_tokens'):,} with full attention")
        for pool, runs in figures.items():
            if pool != "full attention":
                ratio = sum_of(runs, "computed") / full
                print(
                    f"    {pool:20} {runs[0]['blocks']:6,} blocks, {runs[0]['bytes'] / 2**20:6,.0f} MiB: {ratio:6.3f} "
                    f"times {verdict(ratio, GOAL_COMPUTED, at_least=False)}"
                )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=tuple(PARTS), default="", help="measure one part only")
    parser.add_argument("--seeds", type=int, default=3, help="random sets of conversations (default: 3)")
    parser.add_argument("--checked", action="store_true", help="check what the rows of the conversations read; slow")
