"""Measures the host's work for the GPU in a layer of Qwen3-0.6B without CUDA graphs. Needs no GPU.

    python -m bench layer-launches

It measures the Python side of kernel launches, in microseconds. Kernels are compiled for an H200, and an empty driver
receives the launches, so Triton's launcher in C is not included. The layers are in bfloat16. Medians are written to
bench/results/layer_launches.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from triton.runtime import driver

from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.triton import fused
from pagewire.network.operations import AttentionHeads
from testing.kernels.triton_driver import Driver
from worker_service.attention import AttentionBatch, AttentionShape, DeviceRows
from worker_service.attention.backends.triton import TritonAttention

NUM_LAYERS, BLOCK_SIZE, NUM_PROCESSORS = 28, 16, 132
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_BLOCKS = 16, 8, 128, 64
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
# For each name: the positions of each row, its new tokens, and the number of leading rows with one new token.
STEPS = {
    "64 decoding rows": ([512] * 64, [1] * 64, 64),
    "4 prompts": ([512] * 4, [200] * 4, 0),
    "60 decoding rows and 4 prompts": ([512] * 64, [1] * 60 + [20] * 4, 60),
}


def make_caches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (NUM_BLOCKS + 1, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    storage = torch.empty(shape, dtype=DTYPE)
    return [(keys, values) for keys, values in (storage[:, layer].unbind(1) for layer in range(NUM_LAYERS))]


def measure_attention(lengths: list[int], num_queries: list[int], num_decodes: int, num_steps: int) -> dict:
    """Return medians over steps, in microseconds: the work done once per step, the work per layer, and their sum."""
    caches = make_caches()
    heads = AttentionHeads(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    shape = AttentionShape((heads,) * NUM_LAYERS, BLOCK_SIZE, DTYPE, DTYPE)
    backend = TritonAttention(shape, NUM_PROCESSORS, CPU)
    starts = torch.tensor([0, *num_queries]).cumsum(0)
    num_tokens = int(starts[-1])
    rows = DeviceRows(starts.int(), torch.tensor(lengths, dtype=torch.int32), num_decodes)
    tables = torch.zeros((len(lengths), NUM_BLOCKS), dtype=torch.int32)
    batch = AttentionBatch(starts.tolist(), lengths, tables[None], torch.zeros(1, num_tokens, dtype=torch.int64), rows)
    query = torch.zeros(num_tokens, NUM_HEADS, HEAD_DIM, dtype=DTYPE)
    prepared, layers = [], []
    for _ in range(num_steps):
        begun = time.perf_counter()
        attend = backend.prepare(batch, caches)
        ready = time.perf_counter()
        for layer in range(NUM_LAYERS):
            attend.attend_cached(layer, query, None)
        prepared.append(ready - begun)
        layers.append((time.perf_counter() - ready) / NUM_LAYERS)
    step_us, layer_us = (statistics.median(seconds[num_steps // 5 :]) * 1e6 for seconds in (prepared, layers))
    return {"once_a_step_us": step_us, "layer_us": layer_us, "step_us": step_us + NUM_LAYERS * layer_us}


def measure_heads(num_tokens: int, num_steps: int) -> float:
    """Return the median time, in microseconds, of rotating a layer's heads and storing keys and values in the cache."""
    caches, angles = make_caches(), torch.zeros(num_tokens, HEAD_DIM, dtype=DTYPE)
    weight = torch.ones(HEAD_DIM, dtype=DTYPE)
    preparation = NormRopeParams(NUM_HEADS, weight, weight, 1e-6, angles, angles.clone())
    heads = torch.zeros(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE)

    def step() -> None:
        caching = fused.HeadCaching(torch.zeros(num_tokens, dtype=torch.int64))
        for layer in range(NUM_LAYERS):
            caching.turn(heads, preparation, *caches[layer])

    return _median_us(step, num_steps) / NUM_LAYERS


def _median_us(step: Callable[[], None], num_steps: int) -> float:
    seconds = []
    for _ in range(num_steps):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[num_steps // 5 :]) * 1e6


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of each kind; a fifth of them warm up (default: 300)"
    )


def measure(arguments: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    driver.set_active(Driver())
    with torch.inference_mode():
        attention = {name: measure_attention(*step, arguments.steps) for name, step in STEPS.items()}
        return {"attention": attention, "heads_us": measure_heads(64, arguments.steps)}


def report(found: dict) -> None:
    print(f"{'attention, us':32s} {'once a step':>12s} {'a layer':>8s} {f'{NUM_LAYERS} layers':>10s}")
    for name, figures in found["attention"].items():
        once, layer, step = figures["once_a_step_us"], figures["layer_us"], figures["step_us"]
        print(f"{name:32s} {once:12.1f} {layer:8.1f} {step:10.0f}")
    print(f"rotating and caching the heads of a layer, 64 tokens: {found['heads_us']:.1f} us")
