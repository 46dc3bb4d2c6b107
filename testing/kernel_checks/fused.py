"""Checks of `kernels/triton/fused.py`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.triton import fused
from testing.kernel_checks.case import BenchCase, CompileCase, DeviceCase
from testing.kernel_checks.decode_attention import strided

EPS = 1e-6
# Upper bound on the distance between a value and the next value of its dtype, as a share of the value.
STEPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float8_e4m3fn: 2.0**-3}
MAX_DIFFERING = 0.01
TRITON_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TRITON_TYPES[torch.float8_e4m3fn] = "*fp8e4nv"


def assert_same_rounding(actual: Tensor, expected: Tensor, case: str) -> None:
    """Assert that results are equal up to the rounding of their sums.

    Narrow floats are equal, except a few values whose sums were rounded in the other direction. float32 may differ in
    its last bits. The rotation of a pair adds two numbers, which may cancel, so the error is measured in units of the
    largest value.
    """
    assert actual.shape == expected.shape, f"{case}: {list(actual.shape)} is not {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{case}: {actual.dtype} is not {expected.dtype}"
    if actual.numel() == 0:
        return
    wide, wide_expected = actual.double(), expected.double()
    assert torch.equal(wide.isnan(), wide_expected.isnan()), f"{case}: NaN stands elsewhere"
    wide, wide_expected = wide.nan_to_num(0.0), wide_expected.nan_to_num(0.0)
    largest = max(float(wide_expected.abs().max()), 2.0**-14)
    error = float((wide - wide_expected).abs().max())
    num_steps = 8 if actual.dtype == torch.float32 else 2
    assert error <= num_steps * STEPS[actual.dtype] * largest, f"{case}: off by {error} of at most {largest}"
    if actual.dtype != torch.float32:
        differing = float((wide != wide_expected).double().mean())
        assert differing <= max(MAX_DIFFERING, 1.5 / actual.numel()), f"{case}: {differing:.2%} of all values differ"


def check_norms(device: torch.device, dtype: torch.dtype, num_tokens: int, size: int, seed: int) -> None:
    """Check `rms_norm` and `add_rms_norm` on rows that are views of longer rows."""
    case = f"norms of {num_tokens} rows of {size} {dtype}, seed {seed}"
    torch.manual_seed(seed)
    rows = (3 * torch.randn(2, num_tokens, size + 16, device=device)).to(dtype)
    x, update = rows[..., :size]
    weight = (1 + 0.1 * torch.randn(size, device=device)).to(dtype)
    assert_same_rounding(fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), case)
    theirs = x.clone()
    expected = reference.add_rms_norm(theirs, update, weight, EPS)
    beside = rows[..., size:].clone()
    actual = fused.add_rms_norm(x, update, weight, EPS)
    assert torch.equal(x, theirs), f"{case}: the sum differs"
    assert torch.equal(rows[..., size:], beside), f"{case}: something was written beside the rows"
    assert_same_rounding(actual, expected, case)


def check_silu_mul(device: torch.device, dtype: torch.dtype, num_tokens: int, size: int, seed: int) -> None:
    """Check `silu_mul`, including large gates of both signs."""
    torch.manual_seed(seed)
    gate_up = (3 * torch.randn(num_tokens, 2 * size + 8, device=device)).to(dtype)[:, : 2 * size]
    gate_up[0, 0], gate_up[-1, size - 1] = -200.0, 200.0
    case = f"silu_mul of {num_tokens} rows of {size} {dtype}, seed {seed}"
    actual, expected = fused.silu_mul(gate_up), reference.silu_mul(gate_up)
    assert_same_rounding(actual, expected, case)
    assert abs(float(actual[0, 0])) <= 1e-6, f"{case}: silu(-200) is not 0"


def make_heads(
    device: torch.device, dtype: torch.dtype, num_tokens: int, total_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return heads [T, total_heads, head_dim], two norm weights [2, head_dim], and cos and sin [T, head_dim]."""
    heads = torch.randn(num_tokens, total_heads, head_dim, device=device).to(dtype)
    weights = (1 + 0.1 * torch.randn(2, head_dim, device=device)).to(dtype)
    angles = 100 * torch.rand(num_tokens, head_dim // 2, device=device)
    cos = torch.cat([angles.cos(), angles.cos()], 1).to(dtype)
    return heads, weights, cos, torch.cat([-angles.sin(), angles.sin()], 1).to(dtype)


def check_norm_rope(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normalized: str,
    seed: int,
) -> None:
    """Check `norm_rope` without a cache. `normalized` names the heads that have a norm weight, some of "qk", and has an
    "r" if heads are rotated first."""
    case = f"norm_rope of {num_tokens} x {num_heads}/{num_kv_heads} x {head_dim} {dtype}, {normalized=}, seed {seed}"
    torch.manual_seed(seed)
    heads, weights, cos, sin = make_heads(device, dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    chosen = [weight if name in normalized else None for name, weight in zip("qk", weights, strict=True)]
    ours, theirs = heads.clone(), heads.clone()
    preparation = NormRopeParams(num_heads, *chosen, EPS, cos, sin, "r" in normalized)
    parts = fused.norm_rope(ours, preparation)
    reference.norm_rope(theirs, preparation)
    assert torch.equal(ours[:, -num_kv_heads:], heads[:, -num_kv_heads:]), f"{case}: the values changed"
    assert_same_rounding(ours, theirs, case)
    assert torch.equal(torch.cat(parts, 1), ours), f"{case}: what is returned are no views"


def check_norm_rope_and_cache(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int,
    normalized: str = "qk",
) -> None:
    """Check `HeadCaching` on a layer of a block-major cache.

    The other slots of the cache contain NaN. Every fifth token has no slot.
    """
    case = (
        f"norm_rope_and_cache of {num_tokens} x {num_heads}/{num_kv_heads} x {head_dim} {dtype} into {cache_dtype} of "
        f"blocks of {block_size}, {normalized=}, seed {seed}"
    )
    torch.manual_seed(seed)
    heads, weights, cos, sin = make_heads(device, dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    chosen = [weight if name in normalized else None for name, weight in zip("qk", weights, strict=True)]
    num_blocks = num_tokens // block_size + 3
    blocks = torch.full((num_blocks, 2, 2, block_size, num_kv_heads, head_dim), float("nan"), device=device)
    ours, theirs = blocks.to(cache_dtype), blocks.to(cache_dtype)  # [block, layer, K or V, ...]
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    slots[1::5] = -1
    preparation = NormRopeParams(num_heads, *chosen, EPS, cos, sin, "r" in normalized)

    turned = heads.clone()
    queries, keys, values = reference.norm_rope(turned, preparation)
    reference.reshape_and_cache(keys, values, theirs[:, 1, 0], theirs[:, 1, 1], slots)
    fresh = heads.clone()
    caching = fused.HeadCaching(slots.int() if seed % 2 else slots)
    actual = caching.turn(fresh, preparation, ours[:, 1, 0], ours[:, 1, 1])
    assert_same_rounding(actual, queries, case)
    assert torch.equal(fresh[:, num_heads:], heads[:, num_heads:]), f"{case}: keys or values changed"
    assert_same_rounding(ours, theirs, case)


def device_cases() -> Iterator[DeviceCase]:
    def case(name: str, check: Callable[..., None], *arguments: object) -> DeviceCase:
        return DeviceCase(name, lambda device: check(device, *arguments))

    bfloat16, float16, float32, float8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    for dtype in (bfloat16, float16, float32):
        for num_tokens, size in ((1, 64), (7, 100), (257, 1024), (4096, 4096), (64, 8192), (3, 65536)):
            yield case(f"norms {num_tokens}x{size} {dtype}", check_norms, dtype, num_tokens, size, 1)
        for num_tokens, size in ((1, 27), (300, 3072), (2048, 12288)):
            yield case(f"silu_mul {num_tokens}x{size} {dtype}", check_silu_mul, dtype, num_tokens, size, 2)
        for head_dim in (16, 32, 64, 80, 96, 112, 128, 256, 512):
            yield case(f"norm_rope {head_dim} {dtype}", check_norm_rope, dtype, 515, 16, 4, head_dim, "qk", 3)
            arguments = (dtype, dtype, 515, 16, 4, head_dim, 16, 4)
            yield case(f"norm_rope_and_cache {head_dim} {dtype}", check_norm_rope_and_cache, *arguments)
    for normalized in ("", "q", "k", "qkr"):
        arguments = (bfloat16, 100, 32, 8, 128, normalized, 5)
        yield case(f"norm_rope normalized={normalized}", check_norm_rope, *arguments)
        arguments = (bfloat16, bfloat16, 100, 32, 8, 128, 16, 5, normalized)
        yield case(f"norm_rope_and_cache normalized={normalized}", check_norm_rope_and_cache, *arguments)
    for block_size in (8, 16, 48, 256):
        for head_dim in (16, 80, 128):
            arguments = (bfloat16, float8, 1000, 32, 8, head_dim, block_size, 6)
            yield case(f"norm_rope_and_cache fp8 {block_size} {head_dim}", check_norm_rope_and_cache, *arguments)


def bench_cases() -> Iterator[BenchCase]:
    """Yield benchmarks of one layer of an 8B model with 8,192 tokens in the step, and of torch's norm for
    comparison."""
    num_tokens, size = 8192, 4096
    num_bytes = 2 * num_tokens * size  # bytes of one matrix in bfloat16

    def matrices(device: torch.device, num_columns: int) -> list[Tensor]:
        return [torch.randn(num_tokens, num_columns, device=device).bfloat16() for _ in range(3)]

    def add_rms_norm(device: torch.device) -> list[Callable[[], object]]:
        weight = torch.ones(size, device=device).bfloat16()
        inputs = zip(matrices(device, size), matrices(device, size), strict=True)
        return [lambda x=x, update=update: fused.add_rms_norm(x, update, weight, EPS) for x, update in inputs]

    def torch_add_rms_norm(device: torch.device) -> list[Callable[[], object]]:
        weight = torch.ones(size, device=device).bfloat16()
        inputs = zip(matrices(device, size), matrices(device, size), strict=True)
        norm = torch.nn.functional.rms_norm
        return [lambda x=x, update=update: norm(x.add_(update), (size,), weight, EPS) for x, update in inputs]

    def silu_mul(device: torch.device) -> list[Callable[[], object]]:
        return [lambda gate_up=gate_up: fused.silu_mul(gate_up) for gate_up in matrices(device, 6 * size)]

    def norm_rope_and_cache(device: torch.device) -> list[Callable[[], object]]:
        return [_norm_rope_and_cache_call(device, num_tokens) for _ in range(3)]

    yield BenchCase("add_rms_norm", add_rms_norm, 4 * num_bytes)
    yield BenchCase("add_rms_norm of torch", torch_add_rms_norm, 4 * num_bytes)
    yield BenchCase("silu_mul", silu_mul, 9 * num_bytes)
    num_angles = 2 * num_tokens * 128
    num_moved = 2 * (2 * num_tokens * 48 * 128 + num_angles) + 8 * num_tokens
    yield BenchCase("norm_rope_and_cache", norm_rope_and_cache, num_moved)


def _norm_rope_and_cache_call(device: torch.device, num_tokens: int) -> Callable[[], object]:
    heads, weights, cos, sin = make_heads(device, torch.bfloat16, num_tokens, 48, 128)
    cache = torch.empty(num_tokens // 16, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(num_tokens // 16, device=device).repeat_interleave(16) * 16
    slots += torch.arange(16, device=device).repeat(num_tokens // 16)
    keys, values = cache.unbind(1)
    preparation = NormRopeParams(32, *weights, EPS, cos, sin)
    return lambda: fused.HeadCaching(slots).turn(heads, preparation, keys, values)


def compile_cases() -> Iterator[CompileCase]:
    kernels = fused._rms_norm_kernel, fused._silu_mul_kernel, fused._norm_rope_kernel
    for dtype in (torch.bfloat16, torch.float32):  # float16 uses the same code as bfloat16
        x = TRITON_TYPES[dtype]
        weights = dict.fromkeys((x, "*fp32"))  # norm weights
        for size, has_update, weight in ((100, False, x), *((4096, True, weight) for weight in weights)):
            padded_size = 1 << (size - 1).bit_length()
            yield CompileCase(
                f"rms_norm {size} {dtype} by {weight}",
                kernels[0],
                {
                    "x": strided(x[1:], 2, "i64"),
                    "update": strided(x[1:], 2, "i64") if has_update else None,
                    **{"weight": weight, "output": x, "num_rows": "i32", "eps": "fp32"},
                },
                {"SIZE": size, "PADDED_SIZE": padded_size, "TILE_ROWS": max(1, 1024 // padded_size)},
                num_warps=min(16, max(4, padded_size // 1024)),
            )
        signature = {"gate_up": x, "output": x, "stride": "i32", "size": "i32"}
        yield CompileCase(f"silu_mul {dtype}", kernels[1], signature, {"TILE": 1024}, divisible_by_16=("size",))
        for cache_dtype, head_dim in (
            (None, 80),
            (None, 16),
            (dtype, 16),
            (dtype, 128),
            (dtype, 512),
            (torch.float8_e4m3fn, 80),
        ):
            for weight in weights if head_dim == 128 else (x,):
                yield _norm_rope_variant(dtype, cache_dtype, head_dim, weight)


def _norm_rope_variant(dtype: torch.dtype, cache_dtype: torch.dtype | None, head_dim: int, weight: str) -> CompileCase:
    x, cache = TRITON_TYPES[dtype], TRITON_TYPES[cache_dtype or dtype]
    angles, layer = strided(x[1:], 2, "i64"), strided(cache[1:], 4, "i64")
    signature = {
        "heads": strided(x[1:], 3, "i64"),
        **{"query_weight": weight if head_dim == 128 else None, "key_weight": weight, "eps": "fp32"},
        "angles": (angles, angles),
        "target": (layer, layer, "*i64") if cache_dtype else None,
    }
    padded_half = 1 << (head_dim // 2 - 1).bit_length()
    constexprs = {
        "NUM_HEADS": (32, 8),
        "HEAD_DIM": head_dim,
        "PADDED_HALF": padded_half,
        "BLOCK_SIZE": 16,
        "TILE_HEADS": 1024 // (2 * padded_half),
        "ROTATES_FIRST": head_dim == 80,
    }
    name = f"norm_rope {head_dim} {dtype} into {cache_dtype} by {weight}"
    return CompileCase(name, fused._norm_rope_kernel, signature, constexprs, divisible_by_16=("strides",))
