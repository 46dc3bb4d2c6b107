"""Measures tiles for the attention kernels on this GPU and writes the fastest to `kernels/triton/measured_tiles.json`.

Run it with `python -m bench tune-kernels` or `make gpu-tune-kernels`. Tiles of other shapes stay in the file. The file
is written after every shape, so that an interrupted run keeps its results.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.device_timer import measure
from bench.report import parser_of
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import tiles
from pagewire.kernels.triton.decode_attention import SplitPlan, paged_attention_v1, paged_attention_v2
from pagewire.kernels.triton.prefill_attention import paged_prefill
from pagewire.kernels.triton.tiles import Tile

DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float16": torch.float16}
BLOCK_SIZE = 16
NUM_SETS = 3  # number of sets of caches, used in rotation
SECONDS = 500.0
# Two tiles add in different orders and use different maxima when they round weights, so results differ slightly.
MAX_DIFFERENCE = 2e-2


@dataclass(frozen=True)
class Problem:
    """The rows with which a kernel is timed: rows of equal length, over blocks in random order.

    Attributes:
        num_queries: new tokens of each row, at the end of its positions.
        num_programs: of a split plan; 0: chosen for the device.
    """

    kernel: str
    head_dim: int
    num_groups: int
    dtype: torch.dtype
    num_rows: int
    seq_len: int
    num_queries: int
    num_kv_heads: int = 8
    num_programs: int = 0


def problems(
    kernels: Sequence[str], head_dims: Sequence[int], groups: Sequence[int], dtypes: Sequence[torch.dtype]
) -> Iterator[Problem]:
    """Yield problems of the sizes for which each kernel is intended: a full batch, few long rows, and prompts."""
    sizes = {"paged_attention_v1": (64, 4096, 1), "paged_attention_v2": (4, 8192, 1), "paged_prefill": (8, 2048, 2048)}
    for kernel, head_dim, num_groups, dtype in itertools.product(kernels, head_dims, groups, dtypes):
        yield Problem(kernel, head_dim, num_groups, dtype, *sizes[kernel])


def candidates(kernel: str, current: Tile) -> Iterator[Tile]:
    """Yield the tiles to try. The current tile comes first, so that only a faster tile replaces it."""
    yield current
    rows = (64, 128) if kernel == "paged_prefill" else (16,)
    for block_m, block_n, num_warps, num_stages in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 4, 5)):
        tile = Tile(block_n, num_warps, num_stages, block_m)
        if tile != current:
            yield tile


def make_calls(problem: Problem, device: torch.device) -> list[Callable[[], Tensor]]:
    """Return one call for each set of caches."""
    query_dtype = torch.bfloat16 if problem.dtype == torch.float8_e4m3fn else problem.dtype
    blocks_per_row = -(-problem.seq_len // BLOCK_SIZE)
    num_blocks, num_heads = problem.num_rows * blocks_per_row, problem.num_kv_heads * problem.num_groups
    integers = {"dtype": torch.int32, "device": device}
    seq_lens = torch.full((problem.num_rows,), problem.seq_len, **integers)
    starts = problem.num_queries * torch.arange(problem.num_rows + 1, **integers)
    scoring = Scoring(problem.head_dim**-0.5)

    def make_call() -> Callable[[], Tensor]:
        sizes = (num_blocks, 2, BLOCK_SIZE, problem.num_kv_heads, problem.head_dim)
        key_cache, value_cache = torch.randn(sizes, device=device).to(problem.dtype).unbind(1)
        query = torch.randn(problem.num_rows * problem.num_queries, num_heads, problem.head_dim, device=device)
        tables = torch.randperm(num_blocks, device=device).int().view(problem.num_rows, blocks_per_row)
        arguments = (query.to(query_dtype), key_cache, value_cache, tables, seq_lens)
        if problem.kernel == "paged_prefill":
            return lambda: paged_prefill(*arguments, starts, scoring)
        if problem.kernel == "paged_attention_v1":
            return lambda: paged_attention_v1(*arguments, scoring)
        heads = (num_heads, problem.num_kv_heads, problem.head_dim)
        plan = SplitPlan.allocate(problem.num_rows, *heads, device, problem.num_programs)
        plan.decide(seq_lens)
        return lambda: paged_attention_v2(*arguments, plan, scoring)

    return [make_call() for _ in range(NUM_SETS)]


def tune(
    problem: Problem,
    tried: Sequence[Tile],
    device: torch.device,
    time_calls: Callable[[Sequence[Callable[[], Tensor]]], float],
) -> dict[Tile, float]:
    """Return the seconds of each tile that the device can run.

    Args:
        tried: the first tile must run; the results of the others are compared with its results.
        time_calls: returns the seconds of one call.

    Raises:
        RuntimeError: two tiles compute different results.
    """
    calls = make_calls(problem, device)
    expected: Tensor | None = None
    seconds: dict[Tile, float] = {}
    for tile in tried:
        with tiles.forced(problem.kernel, tile):
            try:
                result = calls[0]().float()
            except Exception as error:  # Triton's errors for too little shared memory have no common base class
                if expected is None:
                    raise
                print(f"  {tile}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            expected = result if expected is None else expected
            difference = float((result - expected).abs().max())
            if not difference <= MAX_DIFFERENCE:
                raise RuntimeError(f"{tile} computes other results than {tried[0]}, by {difference}, for {problem}")
            seconds[tile] = time_calls(calls)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("tune_kernels", __doc__)
    parser.add_argument("--kernels", nargs="+", choices=list(tiles.ESTIMATES), default=list(tiles.ESTIMATES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128])
    parser.add_argument("--groups", nargs="+", type=int, default=[4], help="query heads that share a KV head")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "float8_e4m3fn"])
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time in seconds after which no other shape is started"
    )
    parser.add_argument("--output", type=Path, default=tiles.MEASURED_TILES)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; run this on a machine that has one, with torch built for it")
    device, deadline = torch.device("cuda"), time.monotonic() + options.seconds
    measured = tiles.read(options.output)
    dtypes = [DTYPES[name] for name in options.dtypes]
    for problem in problems(options.kernels, options.head_dims, options.groups, dtypes):
        if time.monotonic() > deadline:
            print(f"out of time before {problem}")
            return 1
        shape_arguments = {"head_dim": problem.head_dim, "num_groups": problem.num_groups, "dtype": problem.dtype}
        current = tiles.lookup(problem.kernel, **shape_arguments)
        tried = list(candidates(problem.kernel, current))
        seconds = tune(problem, tried, device, lambda calls: measure(calls).seconds)
        best = min(seconds, key=seconds.__getitem__)
        print(f"{problem}:\n  {best}, {seconds[best] * 1e6:.1f} us; {current}, {seconds[current] * 1e6:.1f} us")
        measured[tiles.key(problem.kernel, **shape_arguments)] = best
        tiles.write(measured, torch.cuda.get_device_name(device), options.output)
    return 0
