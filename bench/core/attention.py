"""Measures the bandwidth at which the CPU's paged attention reads the KV cache, relative to the memory bandwidth.

    python -m bench attention

Four sequences of 8,192 positions decode. Their blocks are in random order, and each layer's cache is far larger than
the processor's cache. Memory bandwidth is measured by torch's sum over as much memory. The raw numbers are written to
bench/results/attention.json.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import torch

from bench.checkpoint import SHAPES
from bench.goals import verdict
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cpu import CpuKernels, PagedRows
from worker_service.startup.cpu_kernels import load_cpu_kernels

NUM_SEQUENCES, CONTEXT, BLOCK_SIZE, NUM_LAYERS = 4, 8192, 16, 4
# Dtypes of queries and of the cache.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
)
GOAL_SHARE = 0.6


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def layers_of(
    shape: str, dtype: torch.dtype, cache_dtype: torch.dtype, kernels: CpuKernels
) -> tuple[list[Callable[[], object]], int]:
    """Return a call of attention for each layer, and the number of bytes of keys and values that one call reads."""
    config = SHAPES[shape]
    num_kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    num_blocks = NUM_SEQUENCES * CONTEXT // BLOCK_SIZE + 1
    storage = torch.randn(num_blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, head_dim).to(cache_dtype).transpose(3, 4)
    ids = list(range(1, num_blocks))
    random.Random(0).shuffle(ids)
    tables = torch.tensor(ids, dtype=torch.int32).view(NUM_SEQUENCES, -1)
    starts = list(range(NUM_SEQUENCES + 1))
    rows = PagedRows.of(starts, [CONTEXT] * NUM_SEQUENCES, tables[None], torch.full((1, NUM_SEQUENCES), -1))
    query = torch.randn(NUM_SEQUENCES, config["num_attention_heads"], head_dim).to(dtype)
    fresh = torch.randn(NUM_SEQUENCES, num_kv_heads, head_dim).to(dtype)

    def layer(index: int) -> Callable[[], object]:
        caches = storage[:, index, 0], storage[:, index, 1]
        return lambda: kernels.attend(rows, Scoring(head_dim**-0.5), query, fresh, fresh, *caches)

    num_bytes = 2 * NUM_SEQUENCES * CONTEXT * num_kv_heads * head_dim * cache_dtype.itemsize
    return [layer(index) for index in range(NUM_LAYERS)], num_bytes


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure(arguments: argparse.Namespace) -> dict:
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("the CPU kernels are not available: see the warning above")
    torch.set_num_threads(arguments.num_threads)
    memory = torch.randn(128 * 1024 * 1024)
    memory.sum()
    found = {}
    for shape in SHAPES:
        for dtype, cache_dtype in DTYPES:
            layers, num_bytes = layers_of(shape, dtype, cache_dtype, kernels)
            layers[0]()
            bandwidths, reads = [], []
            for _ in range(arguments.rounds):
                bandwidths.append(memory.numel() * memory.itemsize / seconds(memory.sum))
                reads.append(len(layers) * num_bytes / sum(seconds(layer) for layer in layers))
            name = f"{shape} shape, {dtype_name(dtype)} over {dtype_name(cache_dtype)}"
            shares = [read / bandwidth for read, bandwidth in zip(reads, bandwidths, strict=True)]
            found[name] = {
                "gb_per_s": statistics.median(reads) / 1e9,
                "memory_gb_per_s": statistics.median(bandwidths) / 1e9,
                "share": statistics.median(shares),
                "rounds": {"attention": reads, "memory": bandwidths},
            }
    load = {"sequences": NUM_SEQUENCES, "context": CONTEXT, "block_size": BLOCK_SIZE, "threads": arguments.num_threads}
    return {"variant": kernels.variant, "load": load, "attention": found}


def report(figures: dict) -> None:
    load = figures["load"]
    print(f"decode attention of {load['sequences']} x {load['context']} positions, {load['threads']} threads")
    for name, found in figures["attention"].items():
        goal = verdict(found["share"], GOAL_SHARE, at_least=True)
        rates = f"{found['gb_per_s']:5.1f} of {found['memory_gb_per_s']:.1f} GB/s"
        print(f"  {name:38} {rates}: {found['share']:.2f} of the memory's {goal}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
