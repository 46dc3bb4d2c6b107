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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint import GPU_SHAPES, configuration
from bench.gpu.decode_steps import DecodeLoad, Worker, time_steps
from bench.gpu.step_trace import step_times
from bench.measure import in_turns
from bench.peers.arms import PROGRAMS, Batch, child_environ, conversation
from pagewire import AsyncClient, SamplingParams
from pagewire.bench.run import run
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload
from pagewire.common.wire.messages import StepPlan
from pagewire.progress import Progress
from testing import services
from testing.part import Case, UnavailableError
from worker_service.runner.profile import NUM_STEPS_BEFORE


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. Lengths are in tokens."""

    small: str  # a key of GPU_SHAPES
    large: str
    small_batches: tuple[int, ...]
    large_batches: tuple[int, ...]
    context: int
    num_steps: int  # number of timed steps, in each of `num_rounds` rounds
    num_rounds: int
    max_num_batched_tokens: int
    workload: Workload
    idle_batch: int
    num_profiled_steps: int
    swap_batch: int
    swap_bytes: int
    table_batches: tuple[int, ...]  # of the kernel tables
    peer_batches: tuple[int, ...]  # of steps compared with peers; each batch size compiles for a minute or more
    prompts: tuple[tuple[int, int], ...]  # pairs of number and length
    num_streams: tuple[int, ...]
    peer_workload: Workload
    compiler: str  # backend of torch.compile, for peers


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
    table_batches=(1, 32, 256),
    peer_batches=(1, 32),
    prompts=((1, 1024), (8, 1024), (1, 32768)),
    num_streams=(1, 32, 256),
    peer_workload=Workload(64, LengthRange(100, 1024), LengthRange(100, 1024)),
    compiler="inductor",
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
    table_batches=(2,),
    peer_batches=(2,),
    prompts=((1, 64), (2, 64), (1, 300)),
    num_streams=(1, 2),
    peer_workload=Workload(2, LengthRange(10, 20), LengthRange(5, 10)),
    compiler="eager",
)
# Every request has a temperature, as in nano-vllm's benchmark.
SAMPLED = SamplingParams(temperature=0.6, ignore_eos=True)
# Output tokens of the warm-up batches that precede the measurement.
WARM_UP_LEN = 8
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Setting:
    """The device and the sizes of a run, and the directory for model configurations."""

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
    """Time a decode step of the 0.6B shape."""
    return _decode(setting, setting.sizes.small, setting.sizes.small_batches)


def decode_large(setting: Setting) -> Iterator[Case]:
    """Time a decode step of the 8B shape."""
    return _decode(setting, setting.sizes.large, setting.sizes.large_batches)


def _decode(setting: Setting, shape: str, batches: tuple[int, ...]) -> Iterator[Case]:
    sizes = setting.sizes
    loads = {batch: DecodeLoad(batch, sizes.context, sizes.num_steps) for batch in batches}

    @functools.cache  # all cases use one worker
    def worker() -> Worker:
        return make_worker(setting, shape, list(loads.values()))

    for batch, load in loads.items():
        yield Case(decode_name(shape, batch), lambda load=load: _time_rounds(worker(), load, sizes))


def make_worker(
    setting: Setting, shape: str, loads: list[DecodeLoad], max_position_embeddings: int = 4096, **options: Any
) -> Worker:
    model = configuration(shape, setting.directory, max_position_embeddings=max_position_embeddings)
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
    """Run nano-vllm's workload through both services over gRPC."""

    def measure() -> dict[str, Any]:
        workload = setting.sizes.workload
        with serving(setting, setting.sizes.small) as url:
            rates = [asyncio.run(_rate(url, setting, workload, seed)) for seed in range(setting.sizes.num_rounds + 1)]
        del rates[0]  # warm-up
        return {"tokens_per_s": statistics.median(rates), "rounds": rates, **_amounts(setting, workload)}

    yield Case(THROUGHPUT, measure)


@contextmanager
def serving(setting: Setting, shape: str, *further: object) -> Iterator[str]:
    """Run both services and yield the scheduler's URL. `further` are additional flags of the worker."""
    budget = ["--max-num-batched-tokens", setting.sizes.max_num_batched_tokens]
    # The default on a CPU is a pool of several gigabytes.
    pool = [] if setting.is_cuda else ["--num-device-blocks", 512]
    worker = ["--device", setting.device, "--load-format", "dummy", "--dtype", "bfloat16", *pool, *budget, *further]
    with services.running(configuration(shape, setting.directory), worker=worker, scheduler=budget) as system:
        yield system.url


THROUGHPUT = "nano-vllm's workload, both services"
PEER_OURS, PEER = (f"a quarter of nano-vllm's workload, {arm}" for arm in ("both services", "generate_batch"))


def _requests(setting: Setting, workload: Workload, seed: int) -> list[PlannedRequest]:
    return replace(workload, seed=seed).requests(GPU_SHAPES[setting.sizes.small]["vocab_size"])


def _amounts(setting: Setting, workload: Workload) -> dict[str, Any]:
    requests = _requests(setting, workload, seed=1)
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "num_output_tokens": sum(request.num_output_tokens for request in requests),
    }


async def _rate(url: str, setting: Setting, workload: Workload, seed: int) -> float:
    """Return the output tokens per second of a workload whose requests are all sent at once."""
    requests = _requests(setting, workload, seed)
    async with AsyncClient(url) as client:
        ran = await run(client, requests, SAMPLED, Progress(len(requests), None))
    for request, record in zip(requests, ran.records, strict=True):
        assert record.num_output_tokens == request.num_output_tokens, record.error
    return sum(request.num_output_tokens for request in requests) / ran.duration


def peer(setting: Setting) -> Iterator[Case]:
    """Run a quarter of nano-vllm's workload through both services and transformers' continuous batching, in turns."""

    def measure() -> dict[str, Any]:
        workload, num_rounds = setting.sizes.peer_workload, setting.sizes.num_rounds
        model, num_threads = configuration(setting.sizes.small, setting.directory), 2
        command = [sys.executable, str(PROGRAMS / "transformers_peer.py"), str(model), "--mode", "generate_batch"]
        command += ["--load-format", "dummy", "--device", setting.device, "--dtype", "bfloat16"]
        command += ["--num-threads", str(num_threads)]
        memory = ["--gpu-memory-utilization", 0.4] if setting.is_cuda else []
        rates: dict[str, list[float]] = {PEER_OURS: [], PEER: []}
        with (
            serving(setting, setting.sizes.small, *memory) as url,
            conversation(command, child_environ(num_threads)) as ask,
        ):
            for number, arm in in_turns([PEER_OURS, PEER], num_rounds):
                requests = _requests(setting, workload, seed=number)
                lengths = [request.num_output_tokens for request in requests]
                if arm == PEER:
                    batch = Batch([list(request.prompt_token_ids) for request in requests], lengths)
                    rate = sum(lengths) / float(ask(batch if number > 0 else batch.cut_to(WARM_UP_LEN)))
                else:
                    rate = asyncio.run(_rate(url, setting, workload, number))
                rates[arm] += [rate] if number > 0 else []
        ours, theirs = (statistics.median(of_arm) for of_arm in rates.values())
        figures = {"tokens_per_s": theirs, "ours_tokens_per_s": ours, "times_as_fast": ours / theirs}
        return {**figures, "rounds": rates, **_amounts(setting, workload)}

    yield Case(PEER, measure)


def idle(setting: Setting) -> Iterator[Case]:
    """Measure the idle time of the device between decode steps, with the worker's own trace."""

    def measure() -> dict[str, Any]:
        sizes = setting.sizes
        profile = ["--profile", sizes.num_profiled_steps, "--profile-dir", setting.directory]
        with serving(setting, sizes.small, *profile) as url:
            asyncio.run(_decode_together(url, sizes))
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
    """Let all rows decode, at about the context of the other parts, until the worker has written its trace."""
    num_tokens = 2 * (NUM_STEPS_BEFORE + sizes.num_profiled_steps)
    prompt_len = max(1, sizes.context - num_tokens // 2)
    load = Workload(sizes.idle_batch, LengthRange(prompt_len, prompt_len), LengthRange(num_tokens, num_tokens))
    requests = load.requests(GPU_SHAPES[sizes.small]["vocab_size"])
    async with AsyncClient(url) as client:
        ran = await run(client, requests, SAMPLED, Progress(len(requests), None))
    assert all(record.num_output_tokens == num_tokens for record in ran.records)


# Swapping between device and host


def swap(setting: Setting) -> Iterator[Case]:
    """Measure swap-out and swap-in relative to the bandwidth of pinned copies, and their effect on decode steps."""
    sizes = setting.sizes
    load = DecodeLoad(sizes.swap_batch, sizes.context, sizes.num_steps * 4)

    @functools.cache
    def worker() -> Worker:
        shape = GPU_SHAPES[sizes.small]
        position_bytes = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        num_blocks = -(-sizes.swap_bytes // (16 * position_bytes))
        return make_worker(setting, sizes.small, [load], num_further_blocks=num_blocks, num_host_blocks=num_blocks)

    yield Case(PINNED_COPY, partial(_pinned_copies, setting))
    yield Case(SWAP, lambda: _swap_alone(worker(), sizes))
    yield Case(SWAP_BESIDE_DECODE, lambda: _swap_beside_decode(worker(), load, sizes))


PINNED_COPY = "pinned copies to the host and back"
SWAP = "swap-out and swap-in of 4 GB"
SWAP_BESIDE_DECODE = "decoding beside swaps"


def _pinned_copies(setting: Setting) -> dict[str, Any]:
    """Measure the bandwidth of a pinned copy of one large buffer in each direction."""
    if not setting.is_cuda:
        raise UnavailableError("pinned copies need --device cuda")
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
    """Return the fields of a plan that swaps the worker's additional blocks out, and of a plan that swaps them in.

    Blocks that are adjacent on one side are not adjacent on the other.
    """
    on_device = tuple(worker.further_blocks)
    on_host = tuple(range(len(on_device), 0, -1))
    return (
        {"swap_out_device_blocks": on_device, "swap_out_host_blocks": on_host},
        {"swap_in_host_blocks": on_host, "swap_in_device_blocks": on_device},
    )


def _swap_alone(worker: Worker, sizes: Sizes) -> dict[str, Any]:
    """Measure swaps while no step is computed."""
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
    """Time decode steps without swaps, and decode steps during swaps, alternately out and in."""
    calm = [statistics.median(time_steps(worker, load)) for _ in range(sizes.num_rounds)]
    beside = [statistics.median(_time_steps_beside_moves(worker, load)) for _ in range(sizes.num_rounds)]
    before, meanwhile = statistics.median(calm), statistics.median(beside)
    return {"slowdown": meanwhile / before - 1, "step_seconds": before, "step_seconds_beside_moves": meanwhile}


def _time_steps_beside_moves(worker: Worker, load: DecodeLoad) -> list[float]:
    """Return the seconds of decode steps while blocks are swapped. A new swap begins as soon as the previous one is
    done."""
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
