"""The measurements of `bench/gpu/speed.py`: steps of one worker in this process, and the services as processes."""

import asyncio
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint import GPU_SHAPES, configuration
from bench.gpu.decode_steps import DecodeLoad, Worker, time_steps
from bench.gpu.step_trace import step_times
from bench.peers.arms import PROGRAMS, Batch, child_environ, conversation
from pagewire import AsyncClient, SamplingParams
from pagewire.bench.run import run
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload
from pagewire.common.messages import StepPlan
from pagewire.progress import Progress
from testing import services
from testing.part import Case, UnavailableError
from worker_service.runner.profile import NUM_STEPS_BEFORE


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. Lengths are in tokens."""

    small: str  # of GPU_SHAPES
    large: str
    small_batches: tuple[int, ...]
    large_batches: tuple[int, ...]
    context: int
    num_steps: int  # that are timed, in each of `num_rounds` rounds
    num_rounds: int
    max_num_batched_tokens: int
    workload: Workload
    idle_batch: int
    num_profiled_steps: int
    swap_batch: int
    swap_bytes: int


# nano-vllm's own benchmark: github.com/GeeeekExplorer/nano-vllm, bench.py.
NANO_VLLM = Workload(256, LengthRange(100, 1024), LengthRange(100, 1024))
ON_GPU = Sizes(
    small="Qwen3-0.6B",
    large="Qwen3-8B",
    small_batches=(1, 256),
    large_batches=(1, 32, 256),
    context=1024,
    num_steps=40,
    num_rounds=5,
    max_num_batched_tokens=8192,
    workload=NANO_VLLM,
    idle_batch=64,
    num_profiled_steps=50,
    swap_batch=64,
    swap_bytes=4_000_000_000,
)
REHEARSAL = Sizes(
    small="tiny",
    large="tiny",
    small_batches=(1, 4),
    large_batches=(2,),
    context=64,
    num_steps=5,
    num_rounds=2,
    max_num_batched_tokens=128,
    workload=Workload(8, LengthRange(10, 40), LengthRange(10, 20)),
    idle_batch=4,
    num_profiled_steps=5,
    swap_batch=4,
    swap_bytes=1_000_000,
)
# Each request with a temperature, as in nano-vllm's benchmark.
SAMPLED = SamplingParams(temperature=0.6, ignore_eos=True)
# Batches that go before what is measured, cut to this many output tokens.
WARM_UP_LEN = 8
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Setting:
    """The device and the sizes of a run. Configurations are written to the directory."""

    device: str
    directory: Path
    sizes: Sizes

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


def decode_name(shape: str, batch: int) -> str:
    return f"decode step, {shape} shape, batch {batch}"


# Decoding steps.


def decode_small(setting: Setting) -> Iterator[Case]:
    """Times a decoding step of the 0.6B shape."""
    return _decode(setting, setting.sizes.small, setting.sizes.small_batches)


def decode_large(setting: Setting) -> Iterator[Case]:
    """Times a decoding step of the 8B shape."""
    return _decode(setting, setting.sizes.large, setting.sizes.large_batches)


def _decode(setting: Setting, shape: str, batches: tuple[int, ...]) -> Iterator[Case]:
    sizes = setting.sizes
    loads = {batch: DecodeLoad(batch, sizes.context, sizes.num_steps) for batch in batches}

    @functools.cache  # all cases use one
    def worker() -> Worker:
        return _worker(setting, shape, list(loads.values()))

    for batch, load in loads.items():
        yield Case(decode_name(shape, batch), lambda load=load: _time_rounds(worker(), load, sizes))


def _worker(setting: Setting, shape: str, loads: list[DecodeLoad], **options: Any) -> Worker:
    model = configuration(shape, setting.directory)
    budget = setting.sizes.max_num_batched_tokens
    return Worker(model, setting.device, loads, dtype="bfloat16", max_num_batched_tokens=budget, **options)


def _time_rounds(worker: Worker, load: DecodeLoad, sizes: Sizes) -> dict[str, Any]:
    gc.collect()
    rounds = [time_steps(worker, load) for _ in range(sizes.num_rounds)]
    every = sorted(seconds for of_round in rounds for seconds in of_round)
    return {
        "step_seconds": statistics.median(statistics.mean(of_round) for of_round in rounds),
        "median_step_seconds": statistics.median(every),
        "slowest_tenth_seconds": every[-1 - len(every) // 10],
        "context": load.context,
        "num_steps": load.num_steps,
        "num_rounds": sizes.num_rounds,
        "attention_backend": worker.loaded.ready.attention_backend,
    }


# Both services over gRPC.


def throughput(setting: Setting) -> Iterator[Case]:
    """Runs nano-vllm's workload through both services over gRPC."""

    def measure() -> dict[str, Any]:
        model = configuration(setting.sizes.small, setting.directory)
        budget = ["--max-num-batched-tokens", setting.sizes.max_num_batched_tokens]
        worker = [*_worker_flags(setting), *budget]
        with services.running(model, worker=worker, scheduler=budget) as system:
            rates = asyncio.run(_serve_rounds(system.url, setting.sizes))
        return {"tokens_per_s": statistics.median(rates), "rounds": rates, **_amounts(setting.sizes)}

    yield Case(THROUGHPUT, measure)


THROUGHPUT = "nano-vllm's workload, both services"
PEER = "nano-vllm's workload, transformers generate_batch"


def _worker_flags(setting: Setting) -> list[object]:
    # On a CPU the default is a pool of gigabytes.
    pool = [] if setting.is_cuda else ["--num-device-blocks", 512]
    return ["--device", setting.device, "--load-format", "dummy", "--dtype", "bfloat16", *pool]


def _requests(sizes: Sizes, seed: int) -> list[PlannedRequest]:
    return replace(sizes.workload, seed=seed).requests(GPU_SHAPES[sizes.small]["vocab_size"])


def _amounts(sizes: Sizes) -> dict[str, Any]:
    requests = _requests(sizes, seed=1)
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "num_output_tokens": sum(request.num_output_tokens for request in requests),
    }


async def _serve_rounds(url: str, sizes: Sizes) -> list[float]:
    """Returns the output tokens per second of each round, in which all requests are sent at once."""
    rates = []
    async with AsyncClient(url) as client:
        for index in range(sizes.num_rounds + 1):
            requests = _requests(sizes, seed=index)
            ran = await run(client, requests, SAMPLED, Progress(len(requests), None))
            for request, record in zip(requests, ran.records, strict=True):
                assert record.num_output_tokens == request.num_output_tokens, record.error
            if index:  # the first warms up
                rates.append(sum(request.num_output_tokens for request in requests) / ran.duration)
    return rates


def peer(setting: Setting) -> Iterator[Case]:
    """Runs nano-vllm's workload through transformers' continuous batching, greedily, on the same device."""

    def measure() -> dict[str, Any]:
        model = configuration(setting.sizes.small, setting.directory)
        num_threads = 2
        command = [sys.executable, str(PROGRAMS / "transformers_peer.py"), str(model), "--mode", "generate_batch"]
        command += ["--load-format", "dummy", "--device", setting.device, "--dtype", "bfloat16"]
        command += ["--num-threads", str(num_threads)]
        requests = _requests(setting.sizes, seed=1)
        batch = Batch([list(request.prompt_token_ids) for request in requests], [r.num_output_tokens for r in requests])
        with conversation(command, child_environ(num_threads)) as ask:
            ask(batch.cut_to(WARM_UP_LEN))
            seconds = float(ask(batch))
        return {"tokens_per_s": sum(batch.output_lens) / seconds, **_amounts(setting.sizes)}

    yield Case(PEER, measure)


def idle(setting: Setting) -> Iterator[Case]:
    """Measures how long the device is idle between decoding steps, by the worker's own trace."""

    def measure() -> dict[str, Any]:
        sizes, model = setting.sizes, configuration(setting.sizes.small, setting.directory)
        budget = ["--max-num-batched-tokens", sizes.max_num_batched_tokens]
        profile = ["--profile", sizes.num_profiled_steps, "--profile-dir", setting.directory]
        with services.running(model, worker=[*_worker_flags(setting), *budget, *profile], scheduler=budget) as system:
            asyncio.run(_decode_together(system.url, sizes))
        (path,) = setting.directory.glob("*.trace.json")
        trace = json.loads(path.read_text())
        if not setting.is_cuda:
            raise UnavailableError(f"a trace with {len(trace['traceEvents'])} events, but none of a GPU")
        times = step_times(trace)
        return {
            "idle_share": times.idle_between / times.total,
            "step_seconds": times.total / times.num_steps,
            "num_steps": times.num_steps,
            "batch": sizes.idle_batch,
        }

    yield Case(IDLE, measure)


IDLE = "idle between decoding steps"


async def _decode_together(url: str, sizes: Sizes) -> None:
    """Lets all rows decode until the worker has made its trace, at about the context of the other parts."""
    num_tokens = 2 * (NUM_STEPS_BEFORE + sizes.num_profiled_steps)
    prompt_len = max(1, sizes.context - num_tokens // 2)
    load = Workload(sizes.idle_batch, LengthRange(prompt_len, prompt_len), LengthRange(num_tokens, num_tokens))
    requests = load.requests(GPU_SHAPES[sizes.small]["vocab_size"])
    async with AsyncClient(url) as client:
        ran = await run(client, requests, SAMPLED, Progress(len(requests), None))
    assert all(record.num_output_tokens == num_tokens for record in ran.records)


# Moves between device and host.


def swap(setting: Setting) -> Iterator[Case]:
    """Measures swapping out and in beside the bandwidth of pinned copies, and how much decoding loses meanwhile."""
    sizes = setting.sizes
    load = DecodeLoad(sizes.swap_batch, sizes.context, sizes.num_steps * 4)

    @functools.cache
    def worker() -> Worker:
        shape = GPU_SHAPES[sizes.small]
        position_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        num_blocks = -(-sizes.swap_bytes // (16 * position_bytes))
        return _worker(setting, sizes.small, [load], num_further_blocks=num_blocks, num_host_blocks=num_blocks)

    yield Case(PINNED_COPY, partial(_pinned_copies, setting))
    yield Case(SWAP, lambda: _swap_alone(worker(), sizes))
    yield Case(SWAP_BESIDE_DECODE, lambda: _swap_beside_decode(worker(), load, sizes))


PINNED_COPY = "pinned copies to the host and back"
SWAP = "swap-out and swap-in of 4 GB"
SWAP_BESIDE_DECODE = "decoding beside swaps"


def _pinned_copies(setting: Setting) -> dict[str, Any]:
    """Measures the bandwidth of pinned copies of one large piece, each way."""
    if not setting.is_cuda:
        raise UnavailableError("needs --device cuda: there is nothing to copy to")
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    seconds(host, on_device)
    out = statistics.median(seconds(host, on_device) for _ in range(setting.sizes.num_rounds))
    back = statistics.median(seconds(on_device, host) for _ in range(setting.sizes.num_rounds))
    return {"bytes_per_s": 2 * COPY_BYTES / (out + back), "to_host": COPY_BYTES / out, "to_device": COPY_BYTES / back}


def _swap_plans(worker: Worker) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns fields of plans that move the further blocks out and back in. No two follow each other at both ends."""
    on_device = tuple(worker.further_blocks)
    on_host = tuple(range(len(on_device), 0, -1))
    return (
        {"swap_out_device_blocks": on_device, "swap_out_host_blocks": on_host},
        {"swap_in_host_blocks": on_host, "swap_in_device_blocks": on_device},
    )


def _swap_alone(worker: Worker, sizes: Sizes) -> dict[str, Any]:
    """Measures moves of blocks while nothing is computed."""
    runner, epoch = worker.loaded.runner, worker.begin()
    step = 0

    def seconds(moves: dict[str, tuple[int, ...]]) -> float:
        nonlocal step
        step += 1
        started = time.perf_counter()
        runner.launch(StepPlan(epoch, step, **moves)).result()
        while runner.last_moved_step() < step:
            pass
        return time.perf_counter() - started

    num_bytes = len(worker.further_blocks) * worker.loaded.ready.block_bytes
    pairs = [[seconds(moves) for moves in _swap_plans(worker)] for _ in range(sizes.num_rounds + 1)][1:]
    out, back = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "bytes_per_s": 2 * num_bytes / (out + back),
        "bytes": num_bytes,
        "to_host": num_bytes / out,
        "to_device": num_bytes / back,
    }


def _swap_beside_decode(worker: Worker, load: DecodeLoad, sizes: Sizes) -> dict[str, Any]:
    """Times steps without moves, and steps while blocks move, out and in by turns."""
    calm = [statistics.median(time_steps(worker, load)) for _ in range(sizes.num_rounds)]
    beside = [statistics.median(_time_steps_beside_moves(worker, load)) for _ in range(sizes.num_rounds)]
    before, meanwhile = statistics.median(calm), statistics.median(beside)
    return {"slowdown": meanwhile / before - 1, "step_seconds": before, "step_seconds_beside_moves": meanwhile}


def _time_steps_beside_moves(worker: Worker, load: DecodeLoad) -> list[float]:
    """Yields the seconds of steps while blocks move: as soon as one move is done the next begins."""
    worker.begin()
    plans = [step.plan for step in worker.plans(load)]
    first_timed, turns = len(plans) - load.num_steps, _swap_plans(worker)
    moving_steps = [0]

    def with_moves() -> Iterator[StepPlan]:
        for index, plan in enumerate(plans):
            if index >= first_timed and worker.loaded.runner.last_moved_step() >= moving_steps[-1]:
                plan = replace(plan, **turns[len(moving_steps) % 2 - 1])
                moving_steps.append(plan.step)
            yield plan

    times = [at for at, _ in worker.results(with_moves())]
    assert len(moving_steps) > 2, "one move took all the steps: time more of them"
    return [after - before for before, after in itertools.pairwise(times[first_timed:])]


PARTS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    part.__name__: part for part in (decode_small, decode_large, throughput, peer, idle, swap)
}
