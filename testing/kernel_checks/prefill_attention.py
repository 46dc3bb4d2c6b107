"""Checks of `pagewire.kernels.triton.prefill_attention` against its specification.

All memory that must not be read contains NaN: freed blocks, and positions after the last position of a row or before
its window.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagewire.kernels import reference
from pagewire.kernels.arguments import Scoring
from pagewire.kernels.triton import launching, prefill_attention, tiles
from pagewire.kernels.triton.attention_arguments import AlikeLayers, AttentionConstants, paged_caches
from pagewire.kernels.triton.decode_attention import ANY_LEN, SplitPlan
from pagewire.kernels.triton.paged_attention import PagedAttention
from pagewire.kernels.triton.tiles import Tile
from pagewire.network.operations import BlockPattern
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase, Goal
from testing.kernel_checks.decode_attention import attention_types, make_sinks, weighing_types

E4M3 = torch.float8_e4m3fn
# The allowed error of results for values of about 1, by operand type. The rounding of the results is added to it.
TOLERANCES = {"fp32": 1e-5, "fp16": 2**-10, "bf16": 2**-7}
POISON_BLOCK = 0


@dataclass(frozen=True)
class Case:
    """One batch. A row is (number of queries, seq_len): the queries are its last positions; a seq_len of 0 is padding.

    Attributes:
        is_shared: all rows share the full blocks of the first row as a prefix.
        num_skipped: number of rows at the beginning that the kernel does not receive, like rows that decode.
        query_factor: factor of the queries; the scale of scores is divided by it.
    """

    rows: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    num_kv_heads: int = 2
    num_groups: int = 2
    head_dim: int = 32
    block_size: int = 16
    is_head_major: bool = False
    window: int = 0
    softcap: float = 0.0
    has_alibi: bool = False
    has_sinks: bool = False
    pattern: BlockPattern | None = None
    is_shared: bool = False
    num_skipped: int = 0
    query_factor: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Arguments of `pagewire.kernels.reference.paged_attention`."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: list[int]
    query_start_loc: list[int]
    scoring: Scoring


def make_batch(case: Case, device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(case.seed)
    num_queries, seq_lens = [row[0] for row in case.rows], [row[1] for row in case.rows]
    num_heads = case.num_kv_heads * case.num_groups
    projected = torch.randn(
        (sum(num_queries), num_heads + 2 * case.num_kv_heads, case.head_dim), generator=generator, device=device
    )
    block_tables = _allocate(case, generator)
    is_read = _find_read(case, block_tables)
    return Batch(
        (projected * case.query_factor).to(case.dtype)[:, :num_heads],
        *_make_caches(case, is_read, generator),
        block_tables,
        seq_lens,
        [0, *itertools.accumulate(num_queries)],
        Scoring(
            case.head_dim**-0.5 / case.query_factor,
            case.window,
            torch.rand(num_heads, generator=generator, device=device) if case.has_alibi else None,
            case.softcap,
            make_sinks(num_heads, generator) if case.has_sinks else None,
            pattern=case.pattern,
        ),
    )


def _num_blocks(case: Case) -> list[int]:
    return [-(-seq_len // case.block_size) for _, seq_len in case.rows]


def _allocate(case: Case, generator: torch.Generator) -> Tensor:
    """Return block tables with ids in random order.

    Entries after the last block of a row and entries before its window are the poisoned block.
    """
    num_blocks = _num_blocks(case)
    ids = 1 + torch.randperm(sum(num_blocks), generator=generator, device=generator.device)
    tables = torch.full((len(num_blocks), max(num_blocks) + 1), POISON_BLOCK, device=generator.device)
    for row, (own, (num_queries, seq_len)) in enumerate(zip(ids.split(num_blocks), case.rows, strict=True)):
        tables[row, : num_blocks[row]] = own
        if case.is_shared:
            num_shared = min(seq_len, case.rows[0][1]) // case.block_size
            tables[row, :num_shared] = tables[0, :num_shared]
        if case.window:
            first = max(0, seq_len - num_queries - case.window + 1)
            tables[row, : first // case.block_size] = POISON_BLOCK
    return tables.int()


def _find_read(case: Case, tables: Tensor) -> Tensor:
    """Return which positions any row may read: [blocks, block_size, num_kv_heads]."""
    shape = (sum(_num_blocks(case)) + 1, case.block_size, case.num_kv_heads)
    is_read = torch.zeros(shape, dtype=torch.bool, device=tables.device)
    for row, (num_queries, seq_len) in enumerate(case.rows):
        first = max(0, seq_len - num_queries - case.window + 1) if case.window else 0
        positions = torch.arange(first, seq_len, device=tables.device)
        is_read[tables[row].long()[positions // case.block_size], positions % case.block_size] = True
    return is_read


def _make_caches(case: Case, is_read: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return key and value caches as views of the second of three layers of an allocation."""
    num_blocks, *inner = is_read.shape
    if case.is_head_major:
        inner, is_read = inner[::-1], is_read.transpose(1, 2)
    content = torch.randn((2, num_blocks, *inner, case.head_dim), generator=generator, device=is_read.device)
    content[:, ~is_read] = float("nan")
    dtype = case.cache_dtype or case.dtype
    storage = torch.full((num_blocks, 3, 2, *inner, case.head_dim), float("nan"), device=is_read.device).to(dtype)
    storage[:, 1] = content.transpose(0, 1).to(dtype)
    return [part.transpose(1, 2) if case.is_head_major else part for part in storage[:, 1].unbind(1)]


def check_paged_prefill(device: torch.device, case: Case, tile: Tile | None = None) -> None:
    """Compare `paged_prefill` with the specification, optionally with another tile than the table's."""
    batch = make_batch(case, device)
    expected = reference.paged_attention(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        batch.scoring,
    )
    skipped = case.num_skipped
    start = batch.query_start_loc[skipped]
    integers = {"dtype": torch.int32, "device": device}
    output = torch.full_like(expected, 123.0)
    with contextlib.nullcontext() if tile is None else tiles.forced("paged_prefill", tile):
        returned = prefill_attention.paged_prefill(
            batch.query,
            batch.key_cache,
            batch.value_cache,
            batch.block_tables[skipped:],
            torch.tensor(batch.seq_lens[skipped:], **integers),
            torch.tensor(batch.query_start_loc, **integers)[skipped:],
            batch.scoring,
            output,
        )
    assert returned.data_ptr() == output.data_ptr()
    assert (output[:start] == 123.0).all(), f"rows of others were written: {case}"
    compare(output[start:], expected[start:], batch, f"{case}, {tile}")


def compare(output: Tensor, expected: Tensor, batch: Batch, what: str) -> None:
    """Raise AssertionError if the outputs differ by more than the rounding of operands plus one unit in the last
    place."""
    absolute = TOLERANCES[launching.operand(batch.query.dtype, batch.key_cache.dtype).name]
    difference = (output.float() - expected.float()).abs()
    # The comparison is false for NaN.
    is_close = difference <= absolute + torch.finfo(output.dtype).eps * expected.float().abs()
    assert is_close.all(), (
        f"{int((~is_close).sum())} of {is_close.numel()} elements differ, by {difference.max()} at most: {what}"
    )


def check_paged_attention(device: torch.device, case: Case, num_decodes: int, *, splits: bool) -> None:
    """Compare `PagedAttention` with the specification. The first `num_decodes` rows decode, with or without splits."""
    batch = make_batch(case, device)
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables)
    expected = reference.paged_attention(*tensors, batch.seq_lens, batch.query_start_loc, batch.scoring)
    integers = {"dtype": torch.int32, "device": device}
    seq_lens = torch.tensor(batch.seq_lens, **integers)
    plan = None
    if splits:
        heads = (batch.query.shape[1], case.num_kv_heads, case.head_dim)
        plan = SplitPlan.allocate(num_decodes, *heads, device, num_programs=32 * case.num_kv_heads, min_chunk=16)
        plan.decide(seq_lens[:num_decodes], case.window or ANY_LEN)
    starts = torch.tensor(batch.query_start_loc, **integers)
    caches = paged_caches(batch.key_cache, batch.value_cache)
    layers = AlikeLayers.of(batch.query.shape, batch.query.dtype, caches, batch.scoring)
    rows = (batch.block_tables, seq_lens, starts, num_decodes, plan)
    output = PagedAttention.of(layers, *rows).attend(batch.query, caches)
    compare(output, expected, batch, f"{case}, {num_decodes} decode, {splits=}")


_CHUNKS = ((512, 512), (1000, 1000), (300, 4000), (1, 777), (17, 4096), (2048, 2048), (1, 0), (64, 8192))
_REAL = Case(_CHUNKS, torch.bfloat16, None, 8, 4, 128)
_MIXED = ((1, 4000), (1, 17), (1, 0), (300, 4000), (1000, 1000), (2, 900))


def device_cases() -> Iterator[DeviceCase]:
    pattern: dict[str, object] = {"pattern": BlockPattern(64, 2, 8, 1, 1)}
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "e4m3": {"cache_dtype": E4M3},
        "window": {"window": 1000},
        "small window": {"window": 5},
        "softcap": {"softcap": 30.0},
        "alibi": {"has_alibi": True},
        "sinks": {"has_sinks": True},
        "pattern": pattern,
        "shared": {"is_shared": True},
        "head-major": {"is_head_major": True},
        "mixed batch": {"num_skipped": 3},
        "all": {"cache_dtype": E4M3, "window": 1000, "softcap": 30.0, "has_alibi": True, **pattern},
        "sinks and a window": {"has_sinks": True, "window": 128, "head_dim": 64, "num_groups": 8},
    }
    for name, changes in features.items():
        yield _device_case(f"bfloat16 {name}", replace(_REAL, **changes))
    for dtype in (torch.float16, torch.float32):
        yield _device_case(f"{dtype}", replace(_REAL, dtype=dtype))
        yield _device_case(f"{dtype} e4m3", replace(_REAL, dtype=dtype, cache_dtype=E4M3))
    caches_of = {32: (None,), 64: (E4M3,), 80: (None,), 96: (E4M3,), 112: (None,), 256: (None, E4M3), 512: (None, E4M3)}
    for head_dim, cache_dtype in ((dim, dtype) for dim, dtypes in caches_of.items() for dtype in dtypes):
        case = replace(_REAL, head_dim=head_dim, cache_dtype=cache_dtype, window=300, softcap=20.0)
        yield _device_case(f"head_dim {head_dim} {cache_dtype or 'unquantized'}", case)
    for num_groups, block_size in ((1, 16), (2, 32), (3, 48), (5, 64), (7, 128), (8, 240), (16, 256)):
        case = replace(_REAL, num_groups=num_groups, block_size=block_size, num_kv_heads=2)
        yield _device_case(f"{num_groups} groups, blocks of {block_size}", case)

    for num_groups, num_kv_heads, head_dim in ((20, 8, 128), (71, 1, 64), (128, 1, 128)):
        case = replace(_REAL, num_groups=num_groups, num_kv_heads=num_kv_heads, head_dim=head_dim)
        yield _device_case(f"{num_groups} groups", case)
    yield _device_case("heads of 16, blocks of 8", replace(_REAL, head_dim=16, block_size=8))

    for name, changes in ((name, features[name]) for name in ("plain", "e4m3", "window", "pattern", "sinks")):
        for splits in (False, True):
            case = replace(_REAL, rows=_MIXED, **changes)
            run = functools.partial(check_paged_attention, case=case, num_decodes=3, splits=splits)
            yield DeviceCase(f"paged_attention {name}{', in splits' if splits else ''}", run)


def _device_case(name: str, case: Case) -> DeviceCase:
    return DeviceCase(f"paged_prefill {name}", functools.partial(check_paged_prefill, case=case))


@dataclass(frozen=True)
class _Load:
    """Rows of equal size to time, with heads as in Qwen3-8B and Llama-3.1-8B."""

    num_rows: int
    num_queries: int
    seq_len: int
    cache_dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def flops(self) -> int:
        """Return the floating-point operations of both matrix multiplications, over the positions that each query
        sees."""
        seen = self.num_queries * self.seq_len - self.num_queries * (self.num_queries - 1) // 2
        return 4 * self.num_rows * seen * self.num_heads * self.head_dim


_LOADS = {
    "8 x 2048": _Load(8, 2048, 2048),
    "1 x 16384": _Load(1, 16384, 16384),
    "4 chunks of 2048 at 16384": _Load(4, 2048, 16384),
    "8 x 2048 e4m3": _Load(8, 2048, 2048, E4M3),
}
# Cases without a baseline.
_ALONE = {
    "8 x 2048, blocks of 8": _Load(8, 2048, 2048, block_size=8),
    "8 x 2048, heads of 16": _Load(8, 2048, 2048, head_dim=16),
    "8 x 2048, 20 queries a KV head": _Load(8, 2048, 2048, num_heads=160),
    "8 x 2048, 71 queries a KV head": _Load(8, 2048, 2048, num_heads=71, num_kv_heads=1, head_dim=64),
}


def bench_cases() -> Iterator[BenchCase]:
    for name, load in _LOADS.items():
        baselines = []
        if load.cache_dtype == torch.bfloat16:
            baselines = [f"{kind}, contiguous, {name}" for kind in ("torch varlen flash", "torch sdpa flash")]
            yield BenchCase(baselines[0], functools.partial(_make_varlen, load), flops=load.flops)
            if load.num_queries == load.seq_len:
                yield BenchCase(baselines[1], functools.partial(_make_sdpa, load), flops=load.flops)
        has_goal = name == "8 x 2048"
        yield BenchCase(
            f"paged_prefill {name}",
            functools.partial(_make_paged, load),
            flops=load.flops,
            goals=tuple(Goal(0.8, baseline) for baseline in baselines) if has_goal else (),
        )
    for name, load in _ALONE.items():
        yield BenchCase(f"paged_prefill {name}", functools.partial(_make_paged, load), flops=load.flops)


def _make_paged(load: _Load, device: torch.device) -> Sequence[Callable[[], object]]:
    blocks_per_row = load.seq_len // load.block_size
    num_blocks = load.num_rows * blocks_per_row
    integers = {"dtype": torch.int32, "device": device}
    runs: list[Callable[[], object]] = []
    for _ in range(2):
        sizes = (load.num_rows * load.num_queries, load.num_heads, load.head_dim)
        query = torch.randn(sizes, device=device).bfloat16()
        sizes = (num_blocks, 2, load.block_size, load.num_kv_heads, load.head_dim)
        storage = torch.randn(sizes, device=device).to(load.cache_dtype)
        tables = torch.randperm(num_blocks, device=device).view(load.num_rows, blocks_per_row).int()
        seq_lens = torch.full((load.num_rows,), load.seq_len, **integers)
        starts = load.num_queries * torch.arange(load.num_rows + 1, **integers)
        arguments = (query, storage[:, 0], storage[:, 1], tables, seq_lens, starts, Scoring(load.head_dim**-0.5))
        runs.append(functools.partial(prefill_attention.paged_prefill, *arguments, output=torch.empty_like(query)))
    return runs


def _make_sdpa(load: _Load, device: torch.device) -> Sequence[Callable[[], object]]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    runs: list[Callable[[], object]] = []
    for _ in range(2):
        heads = torch.randn((load.num_rows, load.seq_len, 48, 128), device=device).bfloat16()
        query, key, value = (part.contiguous().transpose(1, 2) for part in heads.split([32, 8, 8], dim=2))
        runs.append(functools.partial(run, query, key, value))
    return runs


def _make_varlen(load: _Load, device: torch.device) -> Sequence[Callable[[], object]]:
    steps = torch.arange(load.num_rows + 1, dtype=torch.int32, device=device)
    runs: list[Callable[[], object]] = []
    for _ in range(2):
        query = torch.randn((load.num_rows * load.num_queries, 32, 128), device=device).bfloat16()
        key, value = torch.randn((2, load.num_rows * load.seq_len, 8, 128), device=device).bfloat16()
        starts = (load.num_queries * steps, load.seq_len * steps, load.num_queries, load.seq_len)
        flash = torch.ops.aten._flash_attention_forward
        runs.append(functools.partial(flash, query, key, value, *starts, 0.0, True, False, scale=128**-0.5))
    return runs


def compile_cases() -> Iterator[CompileCase]:
    """Yield the main variants, and each option that changes the code."""
    plain = {"element": "bf16", "stored": "bf16", "head_dim": 128, "num_groups": 4, "block_size": 16}
    for changes in (
        {},
        {"element": "fp16", "stored": "fp16", "head_dim": 80, "num_groups": 7, "block_size": 48},
        {"element": "fp32", "stored": "fp32", "head_dim": 64},
        {"stored": "fp8e4nv"},
        {"head_dim": 256, "num_groups": 2, "block_size": 256},
        {"softcap": True, "window": True, "alibi": True},
        {"sinks": True, "window": True, "head_dim": 64, "num_groups": 8},
        *({"head_dim": head_dim} for head_dim in (32, 64, 256, 512)),
        {"head_dim": 512, "num_groups": 32},
        {"head_dim": 16, "block_size": 8},
        {"head_dim": 64, "num_groups": 71},
        *({"stored": "fp8e4nv", "head_dim": head_dim} for head_dim in (32, 64, 256, 512)),
        *({"element": "fp32", "stored": "fp32", "head_dim": head_dim} for head_dim in (32, 128, 256, 512)),
        {"pattern": True, "stored": "fp8e4nv"},
        {"pattern": True},
    ):
        name = ", ".join(f"{option} {value}" for option, value in changes.items()) or "plain"
        yield _compile_case(f"paged_prefill {name}", **(plain | changes))


# Bytes that a thread of these cases spills: a tile of 128 queries uses all 255 registers, and a tile of 64 queries
# would read the keys twice as often.
_SPILLS = {
    "paged_prefill stored fp8e4nv, head_dim 256": 24,
    # The compiler spills these few so that a second program fits the registers.
    "paged_prefill head_dim 512": 8,
    "paged_prefill head_dim 512, num_groups 32": 16,
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": E4M3}


def _compile_case(
    name: str,
    element: str,
    stored: str,
    head_dim: int,
    num_groups: int,
    block_size: int,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    pattern: bool = False,
) -> CompileCase:
    tile = tiles.lookup("paged_prefill", head_dim=head_dim, num_groups=num_groups, dtype=_DTYPES[stored])
    weighing = weighing_types(softcap=softcap, alibi=alibi, sinks=sinks, pattern=pattern)
    arguments = attention_types(element, stored, weighing, window="i32" if window else None)
    operand = launching.operand(_DTYPES[element], _DTYPES[stored])
    padded_dim = 1 << (head_dim - 1).bit_length()
    shape = AttentionConstants(num_groups, head_dim, padded_dim, block_size, tile.block_m, tile.block_n, operand)
    return CompileCase(
        name,
        prefill_attention._paged_prefill_kernel,
        {**arguments, "query_start_loc": "*i32", "num_rows": "i32"},
        {"SHAPE": shape},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("strides",),
        overlaps=True,
        min_programs=2 if padded_dim <= 64 or (element == "fp32" and padded_dim <= 256) else 1,
        max_stack=_SPILLS.get(name, 0),
    )
