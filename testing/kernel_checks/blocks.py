"""Checks of `pagewire.kernels.triton.blocks` against its specification, on every byte of source and target."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.triton import blocks
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase, Goal

OPERATIONS = ("copy", "gather", "scatter")
LAYOUTS = ("block_major", "layer_major", "head_major", "one_layer", "all_keys")


@dataclass(frozen=True)
class Shape:
    """Sizes of a pool of blocks."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int


def view(storage: Tensor, layout: str, shape: Shape) -> Tensor:
    """Return the memory of a pool as a tensor with the block index outermost. Two layouts contain only a part of the
    memory."""
    if layout == "layer_major":
        sizes = (shape.num_layers, 2, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return storage.view(sizes).movedim(2, 0)
    inner = (shape.block_size, shape.num_kv_heads)
    order = inner[::-1] if layout == "head_major" else inner
    pool = storage.view(shape.num_blocks, shape.num_layers, 2, *order, shape.head_dim)
    return {
        "block_major": pool,
        "head_major": pool.transpose(3, 4),
        "one_layer": pool[:, -1, 0],
        "all_keys": pool[:, :, 0],
    }[layout]


def make_storage(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return random bytes as `dtype`, which include NaN of every kind."""
    num_bytes = 2 * math.prod(vars(shape).values()) * dtype.itemsize
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8, device=device).view(dtype)


def check_blocks(
    device: torch.device,
    operation: str,
    dtype: torch.dtype,
    shape: Shape,
    *,
    layout: str = "block_major",
    staging_layout: str = "block_major",
    num_ids: int = 3,
    ids_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> None:
    """Check one operation, with ids in random order. The staging memory has the layout of a small pool."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randperm(shape.num_blocks, generator=generator, device=device).to(ids_dtype)
    source_ids, target_ids = ids[:num_ids].clone(), ids[num_ids : 2 * num_ids].clone()
    staging_shape = Shape(**{**vars(shape), "num_blocks": num_ids})
    before = (make_storage(shape, dtype, device, seed), make_storage(staging_shape, dtype, device, seed + 1))
    after = []
    for module in (reference, blocks):
        storage, staging = before[0].clone(), before[1].clone()
        cache, staged = view(storage, layout, shape), view(staging, staging_layout, staging_shape)
        if operation == "copy":
            module.copy_blocks(cache, source_ids, target_ids)
        elif operation == "gather":
            module.gather_blocks(cache, source_ids, staged)
        else:
            module.scatter_blocks(staged, cache, target_ids)
        after.append((storage, staging))
    case = f"{operation}, {shape}, {dtype}, {layout}, {staging_layout}, seed {seed}"
    for name, expected, actual in zip(("cache", "staging"), *after, strict=True):
        num_different = int((expected.view(torch.uint8) != actual.view(torch.uint8)).sum())
        assert num_different == 0, f"{num_different} bytes of the {name} differ: {case}"
    written = operation == "gather"  # the staging's place in the tuples
    assert not torch.equal(before[written].view(torch.uint8), after[1][written].view(torch.uint8)), f"as before: {case}"


def device_cases() -> Iterator[DeviceCase]:
    shapes = [Shape(40, 28, 16, 8, 128), Shape(24, 5, 64, 3, 80), Shape(12, 2, 256, 8, 256), Shape(40, 28, 8, 8, 16)]
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float32]
    for operation, dtype, shape, layout in itertools.product(OPERATIONS, dtypes, shapes, LAYOUTS):
        yield DeviceCase(
            f"{operation}_blocks {dtype} {layout} {vars(shape)}",
            functools.partial(
                check_blocks,
                operation=operation,
                dtype=dtype,
                shape=shape,
                layout=layout,
                staging_layout="block_major" if layout == "layer_major" else layout,
            ),
        )


_POOL = Shape(768, 36, 16, 8, 128)  # Qwen3-8B in bfloat16: 2.25 MiB per block, 1.7 GiB
_NUM_IDS = 64


def bench_cases() -> Iterator[BenchCase]:
    num_bytes = 2 * math.prod(vars(_POOL).values()) * 2 // _POOL.num_blocks * _NUM_IDS
    for operation, layout in itertools.product(OPERATIONS, ("block_major", "layer_major")):
        yield BenchCase(
            f"{operation}_blocks {layout}",
            functools.partial(_make_bench, operation, layout),
            bytes_moved=2 * num_bytes,
            goals=(Goal(0.75),),
        )


def _make_bench(operation: str, layout: str, device: torch.device) -> Sequence[Callable[[], object]]:
    cache = view(make_storage(_POOL, torch.bfloat16, device, 0), layout, _POOL)
    staging_shape = Shape(**{**vars(_POOL), "num_blocks": _NUM_IDS})
    runs: list[Callable[[], object]] = []
    for seed, ids in enumerate(torch.randperm(_POOL.num_blocks, device=device).view(-1, 2, _NUM_IDS)):
        if operation == "copy":
            runs.append(functools.partial(blocks.copy_blocks, cache, ids[0], ids[1]))
            continue
        staging = view(make_storage(staging_shape, torch.bfloat16, device, seed), "block_major", staging_shape)
        if operation == "gather":
            runs.append(functools.partial(blocks.gather_blocks, cache, ids[0], staging))
        else:
            runs.append(functools.partial(blocks.scatter_blocks, staging, cache, ids[0]))
    return runs


def compile_cases() -> Iterator[CompileCase]:
    for (is_gathered, is_scattered), integer in itertools.product(
        [(True, True), (True, False), (False, True)], ["i32", "i64"]
    ):
        yield CompileCase(
            f"blocks, gathered {is_gathered}, scattered {is_scattered}, strides {integer}",
            blocks._copy_kernel,
            {
                "source": blocks._Blocks("*i32", integer, "*i64" if is_gathered else None),
                "target": blocks._Blocks("*i32", integer, "*i64" if is_scattered else None),
                "pieces": blocks._Pieces("i32", "i32", integer, integer),
                "chunks_per_piece": "i32",
            },
            {"CHUNK_WORDS": blocks.CHUNK_WORDS},
            divisible_by_16=("stride", "piece_words", "source_stride", "target_stride"),
        )
