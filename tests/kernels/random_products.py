"""Random weights and activations for matrix multiplications, in every format."""

import contextlib
import random
from dataclasses import replace

import torch

from pagewire.kernels.weight import StoredWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of weights, and of the activations that they are multiplied with.
KINDS = (*((dtype, torch.float32) for dtype in DTYPES), (torch.bfloat16, torch.bfloat16))
NUM_ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 40)


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random_product(seed, dtype):
    """Return a weight whose size is seldom a whole number of packed panels, its bias or None, and activations."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    in_size = rng.choice([1, 7, 64, 255, 256, 257, 700])
    out_size = rng.choice([1, 15, 16, 17, 32, 63, 64, 65, 150])
    print(f"seed {seed}: {in_size} inputs, {out_size} outputs")
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator) if rng.random() < 0.5 else None
    return weight, bias, torch.randn(max(NUM_ROWS), in_size, generator=generator)


Q4_0 = tuple(range(-8, 8))
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES = (
    tuple(range(-128, 128)),
    tuple(range(-32, 32)),
    tuple(range(64)),
    Q4_0,
    tuple(range(16)),
    (120, 127),
    MXFP4,
    IQ4_NL,
)


def random_quantized(seed, rng=None):
    """Return a weight of 8-bit or table codes, with a random group size, kind of scales, and possibly minima."""
    rng = rng or random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    group_size = rng.choice([16, 32, 32, 48, 64, 128])
    in_size = group_size * rng.choice([1, 2, 3, 9, 1200 // group_size])
    out_size = rng.choice([1, 15, 16, 17, 32, 63, 64, 65, 150])
    table = torch.tensor(rng.choice(TABLES), dtype=torch.int8)
    kind, has_minima = rng.choice(["float16", "float32", "powers"]), rng.random() < 0.5
    print(
        f"seed {seed}: {in_size} inputs, {out_size} outputs, groups of {group_size}, {len(table)} codes,",
        f"scales: {kind}, minima: {has_minima}",
    )

    def floats():
        shape = (out_size, in_size // group_size)
        if kind == "powers":
            exponents = torch.randint(-20, 3, shape, generator=generator)
            return torch.where(exponents == -20, 0.0, torch.ldexp(torch.ones(shape), exponents))
        values = torch.randn(shape, generator=generator)
        return values.half().float() if kind == "float16" else values

    codes = table[torch.randint(0, len(table), (out_size, in_size), generator=generator)]
    return StoredWeight(codes, floats(), group_size, floats() if has_minima else None)


def random_activations(seed, num_rows, in_size):
    """Return rows of very different magnitudes; some groups of inputs are zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_size, generator=generator) * 10 ** torch.randn(num_rows, 1, generator=generator)
    x[num_rows // 2, : in_size // 2] = 0
    return x


def with_factors(weight, seed):
    """Return the weight with 8-bit integer scales and minima, and a float16 factor for each 256 inputs."""
    generator = torch.Generator().manual_seed(seed)

    def integers():
        return torch.randint(-128, 128, weight.scale.shape, generator=generator).float()

    def factors():
        return torch.randn(len(weight.values), weight.values.shape[1] // 256, generator=generator).half().float()

    minimum = None if weight.minimum is None else integers()
    minimum_factor = None if minimum is None else factors()
    return replace(weight, scale=integers(), minimum=minimum, scale_factor=factors(), minimum_factor=minimum_factor)


def compact(seed, bits, group_size, has_minima, has_factors):
    """Return a weight of 9 blocks of 256 inputs, either with scale factors or with zero points."""
    generator = torch.Generator().manual_seed(seed)
    lowest = {4: 0, 6: -32, 8: -128}[bits]
    codes = torch.randint(0, 1 << bits, (70, 9 * 256), generator=generator) + lowest
    shape = (70, 9 * 256 // group_size)
    scale = torch.randn(shape, generator=generator).half().float()
    weight = StoredWeight(codes.to(torch.int8), scale, group_size, scale.flip(0) if has_minima else None)
    if has_factors:
        return with_factors(weight, seed)
    zero = torch.randint(0, 1 << bits, shape, generator=generator) + lowest
    return replace(weight, zero=zero.to(torch.int8))
