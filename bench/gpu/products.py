"""Benchmark cases for the matmuls of 0.6B and 8B models, 1 to 256 rows: cuBLAS, cuBLASLt, and our quantised kernels."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional

from bench.checkpoint import GPU_SHAPES
from testing.kernel_checks import linear, scaled
from testing.kernel_checks.case import BenchCase

LIBRARIES = {"cuBLAS": "cublas", "cuBLASLt": "cublaslt"}
NUM_ROWS = (1, 8, 32, 128, 256)
_MIN_WEIGHT_BYTES = 100_000_000  # of all sets of weights, so that no cache holds them


def bench_cases() -> Iterator[BenchCase]:
    """Yield each matmul of a layer and of the output head, for every library and kernel.

    With few rows, reading the weights limits the speed.
    """
    for model in ("Qwen3-0.6B", "Qwen3-8B"):
        for name, (out_size, in_size) in _sizes(GPU_SHAPES[model]).items():
            for num_rows in NUM_ROWS:
                layer = linear.Layer(num_rows, out_size, in_size, "int4", 128)
                product = scaled.Product("channels", num_rows, in_size, out_size)
                arms = {
                    **{library: (partial(_make_torch, library, layer), 2.0) for library in LIBRARIES},
                    "ours, 4 bits": (partial(linear.make_bench, layer), 0.5 + 2 / 128),
                    "ours, FP8": (partial(scaled.make_bench, product), 1.0),
                }
                for arm, (make, weight_bytes) in arms.items():
                    yield BenchCase(
                        f"{model}, {name}, {num_rows} rows: {arm}",
                        make,
                        bytes_moved=round(weight_bytes * out_size * in_size) + 2 * num_rows * (in_size + out_size),
                        flops=2 * num_rows * out_size * in_size,
                    )


def _sizes(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the output and input size of each matmul, by name."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv_heads = shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "qkv": (heads + 2 * kv_heads, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * shape["intermediate_size"], hidden),
        "down": (hidden, shape["intermediate_size"]),
        "head": (shape["vocab_size"], hidden),
    }


def _make_torch(library: str, layer: linear.Layer, device: torch.device) -> Sequence[Callable[[], object]]:
    torch.backends.cuda.preferred_blas_library(LIBRARIES[library])
    x = torch.randn(layer.num_rows, layer.in_size, device=device, dtype=torch.bfloat16)
    num_sets = max(2, -(-_MIN_WEIGHT_BYTES // (2 * layer.out_size * layer.in_size)))
    sizes = (layer.out_size, layer.in_size)
    weights = [torch.randn(sizes, device=device, dtype=torch.bfloat16) for _ in range(num_sets)]
    return [partial(functional.linear, x, weight) for weight in weights]
