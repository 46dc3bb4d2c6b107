"""Parts of `bench/gpu/speed.py`: a decode step's kernels, and the step compared with a compiled model and bare
matmuls."""

import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.checkpoint import GPU_SHAPES
from bench.gpu import plain_model
from bench.gpu.decode_steps import DecodeLoad, Worker, time_steps
from bench.gpu.measurements import Setting, decode_name, make_worker
from bench.gpu.results_page import COMPILED, OURS, PRODUCTS
from bench.gpu.step_trace import step_table
from bench.measure import in_turns
from testing.part import Case, UnavailableError
from worker_service.runner.profile import NUM_STEPS_BEFORE, StepProfile

NUM_KERNELS = 12  # rows of a table; the remaining kernels are summed in one row


def step_tables_small(setting: Setting) -> Iterator[Case]:
    """Trace decode steps of the 0.6B shape: kernels with their times, gaps and launches."""
    return _tables(setting, setting.sizes.small)


def step_tables_large(setting: Setting) -> Iterator[Case]:
    """Trace decode steps of the 8B shape: kernels with their times, gaps and launches."""
    return _tables(setting, setting.sizes.large)


def peer_steps_small(setting: Setting) -> Iterator[Case]:
    """Time decode steps of the 0.6B shape, of a compiled plain model, and of cuBLAS' matmuls alone, in turns."""
    return _beside_peers(setting, setting.sizes.small)


def peer_steps_large(setting: Setting) -> Iterator[Case]:
    """Time decode steps of the 8B shape, of a compiled plain model, and of cuBLAS' matmuls alone, in turns."""
    return _beside_peers(setting, setting.sizes.large)


def _tables(setting: Setting, shape: str) -> Iterator[Case]:
    num_steps = NUM_STEPS_BEFORE + setting.sizes.num_profiled_steps
    return _cases(setting, shape, setting.sizes.table_batches, num_steps, "kernels", _trace_steps)


def _beside_peers(setting: Setting, shape: str) -> Iterator[Case]:
    measure = functools.partial(_time_arms, shape)
    return _cases(setting, shape, setting.sizes.peer_batches, setting.sizes.num_steps, "beside peers", measure)


def _cases(
    setting: Setting, shape: str, batches: Sequence[int], num_steps: int, what: str,
    measure: Callable[[Setting, Worker, DecodeLoad], dict[str, Any]],
) -> Iterator[Case]:  # fmt: skip
    """Yield a case for each batch size. All cases use one worker."""
    loads = [DecodeLoad(batch, setting.sizes.context, num_steps) for batch in batches]
    worker = functools.cache(lambda: make_worker(setting, shape, loads))
    for load in loads:
        run = lambda load=load: measure(setting, worker(), load)  # noqa: E731
        yield Case(f"{decode_name(shape, load.num_rows)}: {what}", run)


def _trace_steps(setting: Setting, worker: Worker, load: DecodeLoad) -> dict[str, Any]:
    worker.begin()
    plans = [step.plan for step in worker.plans(load)]
    directory = setting.directory / f"trace-{load.num_rows}"
    profile = StepProfile(setting.sizes.num_profiled_steps, directory)
    for _ in worker.results(plans[: -load.num_steps]):
        pass
    for _ in worker.results(plans[-load.num_steps :], profile.around_launch):
        pass
    (path,) = directory.glob("*.trace.json")
    trace = json.loads(path.read_text())
    if not setting.is_cuda:
        raise UnavailableError(f"a trace with {len(trace['traceEvents'])} events, but none of a GPU")
    table = step_table(trace)
    kept, others = table.kernels[:NUM_KERNELS], table.kernels[NUM_KERNELS:]
    rest = {"calls": sum(row.calls for row in others), "microseconds": sum(row.microseconds for row in others)}
    return {**asdict(replace(table, kernels=kept)), "other_kernels": rest, "context": load.context}


def _time_arms(shape: str, setting: Setting, worker: Worker, load: DecodeLoad) -> dict[str, Any]:
    torch.compiler.reset()  # otherwise the model of the previous case would stay in memory
    gc.collect()
    device = torch.device(setting.device)
    model = plain_model.make(GPU_SHAPES[shape], load.num_rows, load.context + load.num_steps, device, torch.bfloat16)
    arms: dict[str, Callable[[], float]] = {
        OURS: lambda: statistics.mean(time_steps(worker, load)),
        COMPILED: _compiled_steps(model, load, device, setting.sizes.compiler),
        PRODUCTS: _products(model, load, device),
    }
    rounds: dict[str, list[float]] = {arm: [] for arm in arms}
    for number, arm in in_turns(list(arms), setting.sizes.num_rounds):
        seconds = arms[arm]()
        rounds[arm] += [seconds] if number > 0 else []  # round 0 warms up
    return {**{arm: statistics.median(times) for arm, times in rounds.items()}, "rounds": rounds}


def _compiled_steps(
    model: plain_model.PlainModel, load: DecodeLoad, device: torch.device, compiler: str
) -> Callable[[], float]:
    """Return a function that decodes `num_steps` tokens of each row and returns the mean seconds of a step."""
    options = {"mode": "max-autotune"} if compiler == "inductor" else {}
    step = torch.compile(model, backend=compiler, fullgraph=True, **options)
    positions = torch.arange(load.context, load.context + load.num_steps, device=device).unsqueeze(1)

    @torch.inference_mode()
    def decode() -> None:
        tokens = torch.zeros(load.num_rows, dtype=torch.int64, device=device)
        for position in positions:
            tokens = step(tokens, position).clone()  # the next step overwrites the graph's output

    return functools.partial(_mean_seconds, decode, load.num_steps, device)


def _products(model: plain_model.PlainModel, load: DecodeLoad, device: torch.device) -> Callable[[], float]:
    """Return a function that computes the matmuls of `num_steps` steps and returns the mean seconds of a step."""
    sizes = {module.in_features for module in model.modules() if isinstance(module, torch.nn.Linear)}
    inputs = {size: torch.randn(load.num_rows, size, device=device, dtype=torch.bfloat16) for size in sizes}
    compute: Callable[[], object] = functools.partial(torch.inference_mode()(model.products), inputs)
    if device.type == "cuda":
        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
        compute = graph.replay

    def repeat() -> None:
        for _ in range(load.num_steps):
            compute()

    return functools.partial(_mean_seconds, repeat, load.num_steps, device)


def _mean_seconds(run: Callable[[], None], num_steps: int, device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / num_steps


PARTS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    part.__name__: part for part in (step_tables_small, step_tables_large, peer_steps_small, peer_steps_large)
}
