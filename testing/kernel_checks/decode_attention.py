"""Checks of `pagewire.kernels.triton.decode_attention` against its specification."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import decode_attention, launching, tiles
from pagewire.kernels.triton.attention_arguments import AttentionConstants, ScoreArguments
from pagewire.kernels.triton.launching import Strided
from pagewire.network.operations import BlockPattern
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase, Goal

E4M3 = torch.float8_e4m3fn
NUM_LAYERS = 2
VERSIONS = ("v1", "v2")


@dataclass(frozen=True)
class Step:
    """One comparison: a step of rows that decode, and how scores become weights.

    Attributes:
        num_programs, min_chunk: arguments of the split plan.
        shares_prefix: whether all rows begin with the same block.
    """

    seq_lens: tuple[int, ...]
    num_kv_heads: int = 2
    num_groups: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "block_major"
    window: int = 0
    has_alibi: bool = False
    has_sinks: bool = False
    softcap: float = 0.0
    pattern: BlockPattern | None = None
    num_programs: int = 32
    min_chunk: int = 16
    shares_prefix: bool = True


@dataclass(frozen=True)
class Inputs:
    """The inputs of one comparison. The caches contain NaN wherever the kernel must not read."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    scoring: Scoring
    output: Tensor | None = None


def make_inputs(step: Step, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, device=device)
    num_rows, num_heads = len(step.seq_lens), step.num_kv_heads * step.num_groups
    counts = [-(-seq_len // step.block_size) for seq_len in step.seq_lens]
    max_blocks, num_blocks = max(1, *counts), sum(counts) + 1
    ids = torch.randperm(num_blocks, generator=generator, device=device).int()
    block_tables = make_table(ids, counts, max_blocks + 3)
    if step.shares_prefix:
        block_tables[:, 0] = ids[0]
    storage = _make_storage(step, num_blocks, device)
    key_cache, value_cache = (storage[:, -1, side] for side in range(2))
    for row, seq_len in enumerate(step.seq_lens):
        for head in range(step.num_kv_heads):
            positions = torch.arange(max(0, seq_len - (step.window or seq_len)), seq_len, device=device)
            slots = block_tables[row].long()[positions // step.block_size], positions % step.block_size, head
            key_cache[slots] = normal(len(positions), step.head_dim)
            value_cache[slots] = normal(len(positions), step.head_dim)
    stored = storage.to(step.cache_dtype or step.dtype)
    slopes = torch.rand(num_heads, generator=generator, device=device) if step.has_alibi else None
    sinks = make_sinks(num_heads, generator) if step.has_sinks else None
    scoring = Scoring(step.head_dim**-0.5, step.window, slopes, step.softcap, sinks, pattern=step.pattern)
    query = normal(num_rows, num_heads + 1, step.head_dim).to(step.dtype)[:, :-1]  # a view of a wider projection
    seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=device)
    return Inputs(query, stored[:, -1, 0], stored[:, -1, 1], block_tables, seq_lens, scoring)


def make_sinks(num_heads: int, generator: torch.Generator) -> Tensor:
    """Return sinks below and above the scores: the first is -inf and has no weight, and the last has most of the
    weight."""
    sinks = 3 * torch.randn(num_heads, generator=generator, device=generator.device)
    sinks[0], sinks[-1] = float("-inf"), 5.0
    return sinks


def make_table(ids: Tensor, counts: Sequence[int], max_blocks: int) -> Tensor:
    """Return a block table whose row i has counts[i] consecutive ids. The entries after them are not block ids."""
    table = ids.new_full((len(counts), max_blocks), -7)
    for row, of_row in enumerate(ids[: sum(counts)].split([*counts])):
        table[row, : len(of_row)] = of_row
    return table


def _make_storage(step: Step, num_blocks: int, device: torch.device) -> Tensor:
    """Return memory filled with NaN: [num_blocks, layers, keys and values, block_size, num_kv_heads, head_dim]."""
    if step.layout == "block_major":
        sizes = (num_blocks, NUM_LAYERS, 2, step.block_size, step.num_kv_heads, step.head_dim)
        return torch.full(sizes, float("nan"), device=device)
    assert step.layout == "head_major"
    sizes = (num_blocks, NUM_LAYERS, 2, step.num_kv_heads, step.block_size, step.head_dim)
    return torch.full(sizes, float("nan"), device=device).transpose(3, 4)


def run_version(version: str, step: Step, inputs: Inputs) -> Tensor:
    caches = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens)
    options = (inputs.scoring, inputs.output)
    if version == "v1":
        return decode_attention.paged_attention_v1(*caches, *options)
    plan = make_plan(step, inputs.query.device)
    plan.decide(inputs.seq_lens, step.window or decode_attention.ANY_LEN)
    return decode_attention.paged_attention_v2(*caches, plan, *options)


def make_plan(step: Step, device: torch.device) -> decode_attention.SplitPlan:
    """Return a plan whose scratch memory is filled with NaN."""
    num_heads = step.num_kv_heads * step.num_groups
    sizes = (len(step.seq_lens), num_heads, step.num_kv_heads, step.head_dim)
    plan = decode_attention.SplitPlan.allocate(*sizes, device, num_programs=step.num_programs, min_chunk=step.min_chunk)
    for scratch in (plan.sums, plan.highest, plan.totals):
        scratch.fill_(float("nan"))
    return plan


def specify(inputs: Inputs, step: Step) -> tuple[Tensor, Tensor]:
    """Return the expected results and their allowed error, both [S, num_heads, head_dim] float32.

    The allowed error covers three roundings: of results to their dtype, of weights to the operand type, and of queries
    if operands are float16 and the queries are not. Sums are float32. It also covers the exp2 of a device, which
    returns 0 instead of subnormal float32 numbers. Weights are that small if slopes or sinks leave a position almost no
    weight.
    """
    num_rows = len(step.seq_lens)
    rows = (inputs.block_tables, list(step.seq_lens), [*range(num_rows + 1)])
    query, key_cache = inputs.query.float(), inputs.key_cache.float()
    value_cache = inputs.value_cache.float()
    expected = reference.paged_attention(query, key_cache, value_cache, *rows, inputs.scoring)
    spread = reference.paged_attention(query, key_cache, value_cache.abs(), *rows, inputs.scoring)
    operand = launching.operand(step.dtype, inputs.key_cache.dtype)
    rounding = 0.0 if operand.name == "fp32" else {"fp16": 2.0**-10, "bf16": 2.0**-8}[operand.name]
    limit = torch.finfo(step.dtype).eps / 2 * expected.abs() + (rounding + 64 * 2.0**-24) * spread
    return expected, limit + torch.finfo(torch.float32).tiny * value_cache.abs().nan_to_num().max()


def check_decode(device: torch.device, step: Step, versions: Sequence[str] = VERSIONS, seed: int = 0) -> None:
    """Compare each version with the specification."""
    inputs = make_inputs(step, device, seed)
    expected, limit = specify(inputs, step)
    for version in versions:
        compare(run_version(version, step, inputs), expected, limit, f"{version}, seed {seed}, {step}")


def compare(actual: Tensor, expected: Tensor, limit: Tensor, case: str) -> None:
    difference = (actual.float() - expected).abs()
    is_off = ~(difference <= limit)  # also true for NaN
    if is_off.any():
        rows, heads, _ = is_off.nonzero(as_tuple=True)
        raise AssertionError(
            f"{int(is_off.sum())} of {is_off.numel()} elements are off, by at most "
            f"{difference[is_off].nan_to_num(1e9).max()}, "
            f"in rows {rows.unique().tolist()[:20]} and heads {heads.unique().tolist()[:20]}: {case}"
        )


# On a device


FEATURES: dict[str, dict[str, object]] = {
    "window": {"window": 300},
    "alibi": {"has_alibi": True},
    "softcap": {"softcap": 3.0},
    "sinks": {"has_sinks": True},
    "quantized": {"cache_dtype": E4M3},
    "pattern": {"pattern": BlockPattern(64, 2, 8, 1, 1)},
}


def device_cases() -> Iterator[DeviceCase]:
    lens = (0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 6000, 700, 0, 300, 1024, 64)
    plain = Step(
        lens,
        num_kv_heads=8,
        num_groups=4,
        head_dim=128,
        dtype=torch.bfloat16,
        num_programs=528,
        min_chunk=decode_attention.MIN_CHUNK,
    )
    cases = {"plain": plain}
    for size in (1, 2, len(FEATURES)):
        for names in itertools.combinations(FEATURES, size):
            changes = {key: value for name in names for key, value in FEATURES[name].items()}
            cases[" and ".join(names)] = dataclasses.replace(plain, **changes)
    cases["float16"] = dataclasses.replace(plain, dtype=torch.float16)
    cases["float16, quantized"] = dataclasses.replace(plain, dtype=torch.float16, cache_dtype=E4M3)
    cases["float32"] = dataclasses.replace(plain, dtype=torch.float32)
    cases["float32, quantized"] = dataclasses.replace(plain, dtype=torch.float32, cache_dtype=E4M3)
    sizes = ((16, 4, 8), (32, 1, 16), (64, 16, 256), (80, 7, 48), (96, 2, 32), (112, 3, 64))
    for head_dim, num_groups, block_size in sizes:
        cases[f"head_dim {head_dim}"] = dataclasses.replace(
            plain, head_dim=head_dim, num_groups=num_groups, block_size=block_size, layout="head_major"
        )
    cases["head_dim 256"] = dataclasses.replace(plain, head_dim=256, num_kv_heads=1, num_groups=8)
    for cache_dtype in (torch.bfloat16, E4M3):
        changes = {"head_dim": 512, "num_kv_heads": 2, "num_groups": 8, "cache_dtype": cache_dtype}
        cases[f"head_dim 512 {cache_dtype}"] = dataclasses.replace(plain, **changes)
    for num_groups, num_kv_heads, head_dim in ((20, 8, 128), (71, 1, 64), (128, 1, 128)):
        heads = {"num_kv_heads": num_kv_heads, "num_groups": num_groups, "head_dim": head_dim}
        cases[f"{num_groups} groups"] = dataclasses.replace(plain, **heads)
        cases[f"{num_groups} groups, quantized"] = dataclasses.replace(plain, **heads, cache_dtype=E4M3)
    cases["blocks of 8"] = dataclasses.replace(plain, block_size=8)
    cases["splits of 64 positions"] = dataclasses.replace(plain, seq_lens=(1024, 5))
    cases["one long row"] = dataclasses.replace(plain, seq_lens=(32768 + 5,))
    cases["a long row among short ones"] = dataclasses.replace(plain, seq_lens=(*[100] * 255, 40_000))
    for name, step in cases.items():
        yield DeviceCase(f"decode attention, {name}", functools.partial(check_decode, step=step))
    quantized = dataclasses.replace(plain, cache_dtype=E4M3)
    yield DeviceCase("decode attention, large queries", functools.partial(check_large_queries, step=quantized))
    yield DeviceCase("decode attention, replayed for other lengths", check_replay)


def check_large_queries(device: torch.device, step: Step) -> None:
    """Check bfloat16 queries beyond the range of float16, which is the operand type for 8-bit caches."""
    inputs = make_inputs(step, device, seed=0)
    scoring = dataclasses.replace(inputs.scoring, scale=2.0**-20 * step.head_dim**-0.5)
    inputs = dataclasses.replace(inputs, query=inputs.query * 2**20, scoring=scoring)
    expected, limit = specify(inputs, step)
    for version in VERSIONS:
        compare(run_version(version, step, inputs), expected, limit, f"{version}, large queries, {step}")


def check_replay(device: torch.device) -> None:
    """Check that a graph captured while all rows are padding gives correct results for the lengths at its replay."""
    step = Step((5000, 17, 0, 300), num_kv_heads=8, num_groups=4, head_dim=128, dtype=torch.bfloat16)
    step = dataclasses.replace(step, num_programs=528, min_chunk=64)
    inputs = make_inputs(step, device, seed=0)
    expected, limit = specify(inputs, step)
    plan, lens = make_plan(step, device), inputs.seq_lens.clone()
    caches = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.seq_lens)

    def attend() -> list[Tensor]:
        plan.decide(inputs.seq_lens)
        return [
            decode_attention.paged_attention_v1(*caches, inputs.scoring),
            decode_attention.paged_attention_v2(*caches, plan, inputs.scoring),
        ]

    inputs.seq_lens.zero_()
    graph, results = _capture(attend)
    for lens_now in (lens, torch.zeros_like(lens), lens):
        inputs.seq_lens.copy_(lens_now)
        graph.replay()
    for version, actual in zip(VERSIONS, results, strict=True):
        compare(actual, expected, limit, f"{version}, replayed, {step}")


def _capture(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture a graph of a function after one run, which compiles the kernels."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


# Timing


@dataclass(frozen=True)
class Load:
    """Rows to time, with heads as in Qwen3-8B and Llama-3.1-8B."""

    seq_lens: tuple[int, ...]
    cache_dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def layer_bytes(self) -> int:
        keys_and_values = 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize
        return keys_and_values + 2 * len(self.seq_lens) * self.num_heads * self.head_dim * 2  # queries, results

    @property
    def num_layers(self) -> int:
        """Return the number of layers of a step that is large enough to hide a launch and to evict each layer from the
        device's cache."""
        return max(2, -(-400_000_000 // self.layer_bytes))


BIG, MIDDLE = Goal(0.80), Goal(0.65)  # at least 100 MB of keys and values in a layer; 16 to 100 MB


def bench_cases() -> Iterator[BenchCase]:
    yield from _compared("64 x 4096", Load((4096,) * 64), BIG)
    yield from _compared("32 x 1024", Load((1024,) * 32), BIG)
    yield from _compared("256 x 1024", Load((1024,) * 256), BIG)
    yield from _compared("4 x 1024", Load((1024,) * 4), MIDDLE)
    yield from _compared("4 x 4096", Load((4096,) * 4), MIDDLE)
    yield from _compared("16 x 1024", Load((1024,) * 16), MIDDLE)
    yield _bench("decode attention, 64 x 4096, blocks of 64", Load((4096,) * 64, block_size=64), "", BIG)
    yield _bench("decode attention, 64 x 4096, 16 heads", Load((4096,) * 64, num_heads=16), "", BIG)
    yield _bench("decode attention, 1 x 32768 and 63 x 512", Load((32768, *[512] * 63)), "", BIG)
    yield _bench("decode attention, 64 rows of 64 to 8128", Load(tuple(range(64, 8192, 128))), "", BIG)
    # These cases have not been timed yet, so they have no goals.
    yield _bench("decode attention, 64 x 4096, blocks of 8", Load((4096,) * 64, block_size=8), "")
    yield _bench("decode attention, 64 x 4096, heads of 16", Load((4096,) * 64, head_dim=16), "")
    yield _bench("decode attention, 64 x 4096, 20 queries a KV head", Load((4096,) * 64, num_heads=160), "")
    falcon = Load((4096,) * 64, num_heads=71, num_kv_heads=1, head_dim=64)
    yield _bench("decode attention, 64 x 4096, 71 queries a KV head", falcon, "")
    yield _bench("decode attention, 1 x 1024, in splits of 64", Load((1024,)), "")
    v1 = _bench("paged_attention_v1, 1 x 32768", Load((32768,)), "v1")
    yield v1
    yield _bench("paged_attention_v2, 1 x 32768", Load((32768,)), "v2", Goal(0.60), Goal(5.0, v1.name))
    for name, lens in (("64 x 4096", (4096,) * 64), ("256 x 1024", (1024,) * 256), ("1 x 32768", (32768,))):
        other = "paged_attention_v2, 1 x 32768" if len(lens) == 1 else f"decode attention, {name}"
        # A layer has half the bytes. `_bench` uses the same number of layers for both cases, so the ratio of times
        # applies to tokens.
        yield _bench(f"decode attention, {name}, 8-bit", Load(lens, E4M3), "", Goal(1.7, other))


def _compared(name: str, load: Load, goal: Goal) -> Iterator[BenchCase]:
    yield _bench(f"decode attention, {name}", load, "", goal)
    yield BenchCase(
        f"torch's attention on contiguous keys and values, {name}",
        functools.partial(_make_baseline, load),
        bytes_moved=_num_layers(load) * load.layer_bytes,
    )


def _bench(name: str, load: Load, version: str, *goals: Goal) -> BenchCase:
    make = functools.partial(_make_bench, load, version)
    return BenchCase(name, make, bytes_moved=_num_layers(load) * load.layer_bytes, goals=goals)


def _num_layers(load: Load) -> int:
    return dataclasses.replace(load, cache_dtype=torch.bfloat16).num_layers


def _make_bench(load: Load, version: str, device: torch.device) -> Sequence[Callable[[], object]]:
    """Time a step as a graph: the plan is decided once, then every layer computes attention."""
    num_rows, num_layers = len(load.seq_lens), _num_layers(load)
    max_blocks = -(-max(load.seq_lens) // load.block_size)
    counts = [-(-seq_len // load.block_size) for seq_len in load.seq_lens]
    block_tables = make_table(torch.randperm(sum(counts), device=device).int(), counts, max_blocks)
    sizes = (sum(counts), num_layers, 2, load.block_size, load.num_kv_heads, load.head_dim)
    storage = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_().to(load.cache_dtype)
    query = torch.randn((num_rows, load.num_heads, load.head_dim), dtype=torch.bfloat16, device=device)
    seq_lens = torch.tensor(load.seq_lens, dtype=torch.int32, device=device)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    is_split = version == "v2" or decode_attention.prefers_splits(
        num_rows, load.num_kv_heads, sum(load.seq_lens), max(load.seq_lens), num_processors
    )
    sizes = (num_rows, load.num_heads, load.num_kv_heads, load.head_dim)
    plan = decode_attention.SplitPlan.allocate(*sizes, device) if is_split and version != "v1" else None

    scoring = Scoring(load.head_dim**-0.5)

    def step() -> list[Tensor]:
        if plan is not None:
            plan.decide(seq_lens)
        results = []
        for layer in range(num_layers):
            caches = (query, storage[:, layer, 0], storage[:, layer, 1], block_tables, seq_lens)
            if plan is None:
                results.append(decode_attention.paged_attention_v1(*caches, scoring))
            else:
                results.append(decode_attention.paged_attention_v2(*caches, plan, scoring))
        return results

    return [_replay_of(step)]


def _make_baseline(load: Load, device: torch.device) -> Sequence[Callable[[], object]]:
    """Time torch's attention on contiguous memory.

    The query heads that share a KV head are queries without a mask, so torch's kernel reads keys and values once, like
    ours.
    """
    num_rows, num_groups = len(load.seq_lens), load.num_heads // load.num_kv_heads
    sizes = (_num_layers(load), 2, num_rows, load.num_kv_heads, load.seq_lens[0], load.head_dim)
    storage = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_()
    query = torch.randn((num_rows, load.num_kv_heads, num_groups, load.head_dim), dtype=torch.bfloat16, device=device)

    def step() -> list[Tensor]:
        return [torch.nn.functional.scaled_dot_product_attention(query, keys, values) for keys, values in storage]

    return [_replay_of(step)]


def _replay_of(step: Callable[[], list[Tensor]]) -> Callable[[], object]:
    graph, results = _capture(step)

    def replay() -> object:
        graph.replay()
        return step, results  # keeps the graph's memory alive as long as `replay`

    return replay


# Compiling


# Bytes that a thread of these cases spills, at 72 and 80 registers: the assembler uses fewer registers than it may.
_SPILLS = {("v1", "fp32", 64): 8, ("v2", "bf16", 32): 8}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": E4M3}


def compile_cases() -> Iterator[CompileCase]:
    for version, changes in itertools.chain(
        [(version, {}) for version in VERSIONS],
        [
            ("v1", {"element": "fp32", "stored": "fp32"}),
            ("v1", {"stored": "fp8e4nv", "pattern": True}),
            ("v1", {"head_dim": 80, "num_groups": 7, "block_size": 48, "alibi": True}),
            ("v2", {"element": "fp16", "stored": "fp16", "head_dim": 64, "num_groups": 1}),
            ("v2", {"stored": "fp8e4nv"}),
            ("v2", {"element": "fp16", "stored": "fp8e4nv", "head_dim": 256, "block_size": 256}),
            ("v2", {"softcap": True, "alibi": True, "sinks": True, "pattern": True}),
            ("v1", {"head_dim": 64, "num_groups": 8, "sinks": True}),
            ("v1", {"head_dim": 16, "block_size": 8}),
            ("v2", {"head_dim": 16, "stored": "fp8e4nv"}),
            *(("v2", {"num_groups": num_groups}) for num_groups in (20, 64, 71)),
            ("v2", {"num_groups": 71, "head_dim": 64}),
            ("v1", {"num_groups": 32, "head_dim": 512}),
            ("v2", {"num_groups": 32, "head_dim": 512, "element": "fp16", "stored": "fp8e4nv"}),
            *(
                (version, {"stored": stored, "element": "fp32" if stored == "fp32" else "bf16", "head_dim": head_dim})
                for version in VERSIONS
                for stored in ("bf16", "fp8e4nv", "fp32")
                for head_dim in (32, 64, 256, 512)
            ),
        ],
    ):
        yield _compile_case(version, **changes)
    pointers = dict.fromkeys(("split_starts", "seq_lens", "split_rows"), "*i32")
    numbers = dict.fromkeys(("num_rows", "max_splits", "num_full_splits", "max_positions"), "i32")
    constants = {"MIN_CHUNK": 64, "FULL_CHUNK": 256, "SHARES_PER_PROCESSOR": 4, "ALIGNMENT": 64, "TILE": 128}
    yield CompileCase("split plan", decode_attention._plan_kernel, pointers | numbers, constants)
    arguments = {"splits": _SPLITS, "output": strided("bf16", 3)}
    constants = {"NUM_HEADS": 32, "HEAD_DIM": 80, "PADDED_DIM": 128, "TILE": 16}
    yield CompileCase("reduction", decode_attention._reduction_kernel, arguments, constants)


_SPLITS = decode_attention._Splits("*i32", "*i32", "*fp32", "*fp32", "*fp32")


def strided(element: str, num_dims: int, integer: str = "i32") -> Strided:
    """Return Triton's types of a `Strided` tensor with this number of dimensions."""
    return Strided(f"*{element}", (integer,) * (num_dims - 1))


def attention_types(element: str, stored: str, weighing: ScoreArguments, *, window: str | None) -> dict:
    """Return the types of the arguments that all attention kernels share."""
    return {
        "output": strided(element, 3),
        "query": strided(element, 3),
        "caches": (strided(stored, 4), strided(stored, 4)),
        **{"block_tables": "*i32", "table_stride": "i32", "seq_lens": "*i32", "window": window},
        "weighing": weighing,
    }


def weighing_types(*, softcap: bool, alibi: bool, sinks: bool, pattern: bool) -> ScoreArguments:
    """Return the types of the arguments that turn dot products into weights."""
    blocks = BlockPattern("i32", "i32", "i32", "i32", "i32") if pattern else None
    of_heads = ("*fp32" if alibi else None, "*fp32" if sinks else None)
    return ScoreArguments("fp32", "fp32" if softcap else None, *of_heads, blocks)


def _compile_case(
    version: str,
    element: str = "bf16",
    stored: str = "bf16",
    head_dim: int = 128,
    num_groups: int = 4,
    block_size: int = 16,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    pattern: bool = False,
) -> CompileCase:
    given = {name: value for name, value in locals().items() if name != "version"}
    tile = tiles.lookup(f"paged_attention_{version}", head_dim=head_dim, num_groups=num_groups, dtype=_DTYPES[stored])
    weighing = weighing_types(softcap=softcap, alibi=alibi, sinks=sinks, pattern=pattern)
    arguments = attention_types(element, stored, weighing, window="i32")
    operand = launching.operand(_DTYPES[element], _DTYPES[stored])
    padded_dim = 1 << (head_dim - 1).bit_length()
    shape = AttentionConstants(num_groups, head_dim, padded_dim, block_size, tile.block_m, tile.block_n, operand)
    return CompileCase(
        f"paged_attention_{version} {', '.join(f'{name} {value}' for name, value in given.items())}",
        getattr(decode_attention, f"_paged_attention_{version}_kernel"),
        {"splits": _SPLITS, **arguments} if version == "v2" else arguments,
        {"SHAPE": shape},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("strides",),
        overlaps=True,
        min_programs=2 if tile.block_m * padded_dim < 128 * 128 and (stored, head_dim) != ("fp32", 512) else 1,
        max_stack=_SPILLS.get((version, stored, head_dim), 0),
    )
