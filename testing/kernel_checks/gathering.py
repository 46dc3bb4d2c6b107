"""Checks of `pagewire.kernels.triton.gathering` against its specification, and its benchmarks."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pagewire.kernels import gathering as specification
from pagewire.kernels.gathering import GatheredTokens, RowTables
from pagewire.kernels.sampling import FLOATS, INTEGERS
from pagewire.kernels.triton import gathering
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided

BLOCK_SIZE = 16


def make_tables(
    num_slots: int, max_blocks: int, block_size: int, device: torch.device, seed: int, num_layer_groups: int = 1
) -> RowTables:
    """Return tables of random tokens and blocks, each a view of the first part of a wider table."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(sizes: tuple[int, ...], width: int, highest: int) -> Tensor:
        values = torch.randint(highest, (*sizes, width + 3), generator=generator, dtype=torch.int32)
        return values.to(device)[..., :width]

    token_ids = numbers((num_slots,), max_blocks * block_size + 1, 2**20)
    return RowTables(token_ids, numbers((num_layer_groups, num_slots), max_blocks, 2**31 - 1), block_size)


def check_tokens(
    device: torch.device,
    num_tokens: int,
    num_rows: int,
    *,
    num_slots: int = 20,
    max_blocks: int = 5,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    num_layer_groups: int = 1,
    seed: int,
) -> None:
    """Check tokens at random positions of random rows, including first and last tokens of rows and padding."""
    rng = random.Random(seed)
    tables = make_tables(num_slots, max_blocks, block_size, device, seed, num_layer_groups)
    most = max_blocks * block_size
    lengths = [rng.choice([0, 1, most, rng.randint(1, most)]) for _ in range(num_tokens)]

    def column(values: list[int], offset: int) -> Tensor:
        """Return a view of a longer tensor that begins at `offset`, so that its alignment varies."""
        return torch.tensor([7] * offset + values, dtype=torch.int32, device=device)[offset:]

    slots = column([rng.randrange(num_slots) for _ in range(num_tokens)], rng.randrange(4))
    row_slots = column([rng.randrange(num_slots) for _ in range(num_rows)], rng.randrange(4))
    arguments = (tables, slots, column(lengths, 4), row_slots, max_blocks if num_blocks is None else num_blocks)
    actual, expected = gathering.gather_tokens(*arguments), specification.gather_tokens(*arguments)
    for name, tensor in expected._asdict().items():
        found = getattr(actual, name)
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), f"{name} differ, seed {seed}"
    assert all(slots.data_ptr() % 16 == 0 and slots.is_contiguous() for slots in actual.slot_mapping), "not aligned"


def check_columns(device: torch.device, num_rows: int, *, num_slots: int = 20, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    shape = (len(FLOATS) + len(INTEGERS), num_slots)
    lines = torch.randint(-(2**31), 2**31, shape, generator=generator).to(device, torch.int32)
    seeds = torch.randint(limits.min, limits.max, (num_slots,), generator=generator).to(device)
    slots = torch.randint(num_slots, (num_rows,), generator=generator).to(device, torch.int32)
    num_tokens = slots + 1
    actual = gathering.gather_columns(lines, seeds, slots, num_tokens)
    expected = specification.gather_columns(lines, seeds, slots, num_tokens)
    assert actual.num_tokens is num_tokens
    for name, column in expected._asdict().items():
        found = getattr(actual, name)
        if column is None:
            assert found is None
            continue
        assert found.dtype == column.dtype, name
        assert found.data_ptr() % 16 == 0 or name == "num_tokens", f"{name} is not aligned"
        bits = torch.int64 if name == "seeds" else torch.int32
        assert torch.equal(found.view(bits), column.view(bits)), f"{name} differs, seed {seed}"


def device_cases() -> Iterator[DeviceCase]:
    for num_tokens, num_rows, num_layer_groups in ((1, 1, 1), (256, 256, 1), (16384, 300, 7), (5000, 2, 2), (3, 3, 7)):
        check = functools.partial(
            check_tokens,
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_slots=257,
            max_blocks=2560,
            num_blocks=2000,
            num_layer_groups=num_layer_groups,
            seed=num_tokens,
        )
        name = f"gathering: {num_tokens} tokens of {num_rows} rows, {num_layer_groups} layer groups"
        yield DeviceCase(name, check)
    for num_rows in (1, 256, 1024):
        check = functools.partial(check_columns, num_rows=num_rows, num_slots=1025, seed=num_rows)
        yield DeviceCase(f"gathering: columns of {num_rows} rows", check)


def bench_cases() -> Iterator[BenchCase]:
    """Yield the benchmark. It has no goal because the launch takes most of its short time."""
    num_rows, max_blocks = 256, 2560
    for num_layer_groups, name in ((1, ""), (7, ", 7 layer groups")):
        make = functools.partial(_make_bench, num_rows, max_blocks, num_layer_groups)
        num_bytes = 2 * 4 * num_layer_groups * num_rows * max_blocks
        yield BenchCase(f"gathering: 256 rows that decode{name}", make, bytes_moved=num_bytes)


def _make_bench(
    num_rows: int, max_blocks: int, num_layer_groups: int, device: torch.device
) -> Sequence[Callable[[], object]]:
    tables = make_tables(num_rows + 1, max_blocks, BLOCK_SIZE, device, 1, num_layer_groups)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    lengths = torch.full_like(slots, 1000)
    return [functools.partial(gathering.gather_tokens, tables, slots, lengths, slots, max_blocks)]


def compile_cases() -> Iterator[CompileCase]:
    tables = {"tables": gathering._Tables(strided("i32", 2), strided("i32", 3))}
    rows = dict.fromkeys(("slots", "lengths", "row_slots"), "*i32")
    names = ("num_tokens", "num_rows", "num_blocks")
    gathered = GatheredTokens("*i64", "*i64", "*i64", "*i32")
    tiles = {"TILE_TOKENS": gathering._TILE_TOKENS, "TILE_BLOCKS": gathering._TILE_BLOCKS}
    for num_layer_groups in (1, 7):
        yield CompileCase(
            f"gathering: tokens, {num_layer_groups} layer groups",
            gathering._gather_tokens_kernel,
            {**tables, **rows, "gathered": gathered, **dict.fromkeys(names, "i32")},
            {"NUM_LAYER_GROUPS": num_layer_groups, "BLOCK_SIZE": BLOCK_SIZE, **tiles},
        )
    lines = {"lines": strided("i32", 2), "seeds": "*i64", "slots": "*i32", "columns": "*i32"}
    yield CompileCase(
        "gathering: columns",
        gathering._gather_columns_kernel,
        {**lines, "row_seeds": "*i64", "column_stride": "i32", "num_rows": "i32"},
        {"NUM_LINES": 10, "PADDED_LINES": 16, "TILE": gathering._TILE_ROWS},
    )
