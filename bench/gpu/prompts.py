"""Parts of `bench/gpu/speed.py`: prefill and first tokens of a worker, and client-side latencies of both services."""

import asyncio
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from bench.checkpoint import GPU_SHAPES
from bench.gpu.decode_steps import DecodeLoad, Worker
from bench.gpu.measurements import SAMPLED, Setting, make_worker, serving
from pagewire import AsyncClient
from pagewire.bench.run import run
from pagewire.bench.statistics import percentile
from pagewire.bench.workload import LengthRange, Workload
from pagewire.progress import Progress
from testing.part import Case

SERVED_INPUT_LEN, SERVED_OUTPUT_LEN = 1024, 128
REQUESTS_PER_STREAM = 4


def first_token_small(setting: Setting) -> Iterator[Case]:
    """Time prefill to the first token, 1 x 1k, 8 x 1k and 1 x 32k, of the 0.6B shape."""
    return _first_tokens(setting, setting.sizes.small)


def first_token_large(setting: Setting) -> Iterator[Case]:
    """Time prefill to the first token, 1 x 1k, 8 x 1k and 1 x 32k, of the 8B shape."""
    return _first_tokens(setting, setting.sizes.large)


def _first_tokens(setting: Setting, shape: str) -> Iterator[Case]:
    loads = [DecodeLoad(number, length, 0, num_warm_up_steps=0) for number, length in setting.sizes.prompts]

    longest = max(load.context for load in loads)
    worker = functools.cache(lambda: make_worker(setting, shape, loads, max_position_embeddings=2 * longest))
    for load in loads:
        name = f"first token, {shape} shape, {load.num_rows} x {load.context}"
        yield Case(name, lambda load=load: _time_prefill(worker(), load, setting.sizes.num_rounds))


def _time_prefill(worker: Worker, load: DecodeLoad, num_rounds: int) -> dict[str, Any]:
    """Time a batch of prompts that arrive at once, from the first plan to the result with the last first token."""
    gc.collect()
    times = []
    for _ in range(num_rounds + 1):
        worker.begin()
        plans = [step.plan for step in worker.plans(load)]
        started = time.perf_counter()
        *_, (ended, result) = worker.results(plans)
        assert not result.statuses, f"step {result.step} has rows that failed"
        times.append(ended - started)
    seconds = statistics.median(times[1:])  # the first round warms up
    num_tokens = load.num_rows * load.context
    return {"seconds": seconds, "prompt_tokens_per_s": num_tokens / seconds, "rounds": times[1:]}


def serving_small(setting: Setting) -> Iterator[Case]:
    """Measure first tokens and gaps at 1, 32 and 256 streams through both services, of the 0.6B shape."""
    return _served(setting, setting.sizes.small)


def serving_large(setting: Setting) -> Iterator[Case]:
    """Measure first tokens and gaps at 1, 32 and 256 streams through both services, of the 8B shape."""
    return _served(setting, setting.sizes.large)


def _served(setting: Setting, shape: str) -> Iterator[Case]:
    input_len, output_len = (SERVED_INPUT_LEN, SERVED_OUTPUT_LEN) if setting.is_cuda else (32, 8)
    with ExitStack() as stack:
        url = functools.cache(lambda: stack.enter_context(serving(setting, shape)))
        for number in setting.sizes.num_streams:
            lengths = (LengthRange(length, length) for length in (input_len, output_len))
            workload = Workload(REQUESTS_PER_STREAM * number, *lengths)
            measure = partial(_measure_streams, url, workload, number, GPU_SHAPES[shape]["vocab_size"])
            yield Case(f"serving, {shape} shape, streams: {number}", measure)


def _measure_streams(url: Callable[[], str], workload: Workload, num_streams: int, vocab_size: int) -> dict[str, Any]:
    """Run a workload with `num_streams` concurrent requests, after a warm-up workload."""

    async def streamed(seed: int) -> dict[str, Any]:
        requests = replace(workload, seed=seed).requests(vocab_size)
        async with AsyncClient(url()) as client:
            ran = await run(client, requests, SAMPLED, Progress(len(requests), None), max_concurrency=num_streams)
        assert all(record.is_finished for record in ran.records), [record.error for record in ran.records]
        times = {
            "first_token": [record.ttft for record in ran.records if record.ttft is not None],
            "gap": [gap for record in ran.records for gap in record.itls],
        }
        figures = {f"{name}_p{p}": percentile(values, p) for name, values in times.items() for p in (50, 99)}
        return {**figures, "tokens_per_s": sum(record.num_output_tokens for record in ran.records) / ran.duration}

    asyncio.run(streamed(0))
    return {**asyncio.run(streamed(1)), "num_requests": workload.num_prompts, "input_len": workload.input_len.max}


PARTS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    part.__name__: part for part in (first_token_small, first_token_large, serving_small, serving_large)
}
