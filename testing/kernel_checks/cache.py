"""Checks of `pagewire.kernels.triton.cache` against its specification, on every allocated byte, not only the written
bytes."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.triton import cache
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase, Goal
from testing.kernel_checks.decode_attention import strided

E4M3 = torch.float8_e4m3fn
NUM_LAYERS = 2
LAYOUTS = ("dense", "block_major", "head_major")


@dataclass(frozen=True)
class Shape:
    """The sizes of one comparison. Every third token of a step has no slot."""

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    layout: str = "block_major"
    is_slot_wide: bool = True  # int64, else int32


def make_caches(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return an allocation filled with NaN, and the two caches of its last layer."""
    inner = (shape.block_size, shape.num_kv_heads)
    if shape.layout == "head_major":
        inner = inner[::-1]
    sizes = (shape.num_blocks, NUM_LAYERS, 2, *inner, shape.head_dim)
    if shape.layout == "dense":
        sizes = (2, *sizes[:1], *inner, shape.head_dim)
    storage = torch.full((*sizes,), float("nan"), dtype=torch.float32, device=device).to(dtype)
    if shape.layout == "dense":
        return storage, storage[0], storage[1]
    views = storage.transpose(3, 4) if shape.layout == "head_major" else storage
    return storage, views[:, -1, 0], views[:, -1, 1]


def make_step(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and slots of a step.

    Keys and values are views of one projection. They include NaN and values outside the range of 8-bit floats. Slots
    are in random order.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.num_tokens, 3 * shape.num_kv_heads, shape.head_dim)  # queries, keys, values
    projected = torch.randn(size, generator=generator, device=device)
    projected[0, :, 0], projected[0, :, 1], projected[0, :, -1] = 6e4, -6e4, float("nan")
    _, key, value = projected.to(dtype).split(shape.num_kv_heads, dim=1)
    num_slots = shape.num_blocks * shape.block_size
    slots = torch.randperm(num_slots, generator=generator, device=device)[: shape.num_tokens]
    slots[1::3] = -1
    return key, value, slots if shape.is_slot_wide else slots.int()


def check_reshape_and_cache(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    shape: Shape,
    *,
    seed: int = 0,
) -> None:
    key, value, slots = make_step(shape, dtype, device, seed)
    expected, *expected_caches = make_caches(shape, cache_dtype, device)
    actual, *actual_caches = make_caches(shape, cache_dtype, device)
    reference.reshape_and_cache(key, value, *expected_caches, slots)
    cache.reshape_and_cache(key, value, *actual_caches, slots)
    differs = _bits(actual) != _bits(expected)
    num_different = int((differs & ~(actual.float().isnan() & expected.float().isnan())).sum())
    assert num_different == 0, f"{num_different} elements differ: {shape}, {dtype} to {cache_dtype}, seed {seed}"
    assert not actual.float().isnan().all(), f"nothing was written: {shape}"


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def device_cases() -> Iterator[DeviceCase]:
    variants = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32)]
    variants += [(torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.float32, E4M3)]
    shapes = [Shape(1000, 8, 128, 16, 200), Shape(700, 2, 80, 64, 40), Shape(300, 5, 256, 256, 9)]
    shapes.append(Shape(900, 4, 16, 8, 230))
    for (dtype, cache_dtype), shape, layout in itertools.product(variants, shapes, LAYOUTS):
        case = Shape(**{**vars(shape), "layout": layout})
        name = f"reshape_and_cache {dtype} to {cache_dtype} {vars(case)}"
        yield DeviceCase(
            name,
            functools.partial(check_reshape_and_cache, dtype=dtype, cache_dtype=cache_dtype, shape=case),
        )


def bench_cases() -> Iterator[BenchCase]:
    num_tokens, num_kv_heads, head_dim = 16384, 8, 128
    num_elements = 2 * num_tokens * num_kv_heads * head_dim
    for cache_dtype in (torch.bfloat16, E4M3):
        yield BenchCase(
            f"reshape_and_cache to {str(cache_dtype).removeprefix('torch.')}",
            functools.partial(_make_bench, num_tokens, num_kv_heads, head_dim, cache_dtype),
            bytes_moved=num_elements * (2 + cache_dtype.itemsize) + 8 * num_tokens,
            goals=(Goal(0.75),),
        )


def _make_bench(
    num_tokens: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype, device: torch.device
) -> Sequence[Callable[[], object]]:
    """Time a step of prompts that fill blocks in random order, 16 tokens per block."""
    num_blocks = num_tokens // 16
    storage = torch.zeros((3 * num_blocks, 2, 16, num_kv_heads, head_dim), dtype=cache_dtype, device=device)
    key_cache, value_cache = storage[:, 0], storage[:, 1]
    order = torch.randperm(3 * num_blocks, device=device).view(3, num_blocks, 1)
    runs: list[Callable[[], object]] = []
    for blocks in order:
        heads = torch.randn((num_tokens, 6 * num_kv_heads, head_dim), dtype=torch.bfloat16, device=device)
        _, key, value = heads.split([4 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        slots = (blocks * 16 + torch.arange(16, device=device)).flatten()
        runs.append(functools.partial(cache.reshape_and_cache, key, value, key_cache, value_cache, slots))
    return runs


def compile_cases() -> Iterator[CompileCase]:
    for element, stored, head_dim in (
        ("bf16", "bf16", 128),
        ("fp16", "fp8e4nv", 128),
        ("bf16", "fp8e4nv", 80),
        ("fp32", "fp32", 256),
        ("bf16", "bf16", 512),
    ):
        padded_dim = 1 << (head_dim - 1).bit_length()
        heads, stored_heads = strided(element, 3), strided(stored, 4)
        yield CompileCase(
            f"reshape_and_cache {element} to {stored}, head_dim {head_dim}",
            cache._reshape_and_cache_kernel,
            {
                **{"key": heads, "value": heads, "key_cache": stored_heads, "value_cache": stored_heads},
                **{"slot_mapping": "*i64", "num_rows": "i32"},
            },
            {
                "NUM_HEADS": 8,
                "HEAD_DIM": head_dim,
                "PADDED_DIM": padded_dim,
                "BLOCK_SIZE": 16,
                "TILE_ROWS": cache.TILE_ELEMENTS // padded_dim,
            },
            divisible_by_16=("strides",),
        )
