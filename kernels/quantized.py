"""Rounding of floats to 8-bit and 4-bit codes, and the codes of MXFP4.

Floats are rounded as in llama.cpp, bit for bit like the PyPI package `gguf`: 8 bits as Q8_0, 4 bits as Q4_0. Scales are
float16 numbers, but codes are computed with the scale before its rounding. The code is plain torch; the tests compare
`CpuKernels.quantize` with it.

MXFP4 numbers are 4-bit floats (E2M1) in groups of 32 that share a power of two (E8M0), as the OCP Microscaling Formats
define them (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). All E2M1 numbers
are multiples of one half. A weight therefore stores twice the numbers as integer codes, and half the powers as scales.
"""

import math

import torch
from torch import Tensor

from pagewire.kernels.weight import StoredFormat, StoredWeight

GROUP_SIZE = 32  # inputs per scale, in MXFP4 and in rounded floats
BITS = {"int8": 8, "int4": 4}  # bits of a code, by the names of --quantization
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# The number in the lower half of a byte comes first.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)  # [256, 2]
# By exponent byte; the last byte means NaN. `ldexp` is exact, and the powers of torch may not be.
_HALVED = torch.tensor([*(math.ldexp(1.0, exponent - 128) for exponent in range(255)), math.nan])


MXFP4 = StoredFormat(torch.int8, GROUP_SIZE, 4, has_half_scales=True, has_power_scales=True)


def quantized_format(bits: int) -> StoredFormat:
    """Return the memory format of weights that are quantised to 8-bit or 4-bit codes in groups of GROUP_SIZE inputs."""
    return StoredFormat(torch.int8, GROUP_SIZE, bits, has_half_scales=True)


def quantize(values: Tensor, bits: int) -> StoredWeight:
    """Quantise a weight, float32 [rows, columns], to codes of 8 or 4 bits with one scale per group of GROUP_SIZE
    columns. The number of columns must be a multiple of GROUP_SIZE.

    Raises ValueError if a value is not finite, or if a scale is too large for float16.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    # Divide by a tensor: for division by a number, torch on a GPU multiplies by the inverse, and the last bit differs.
    exact = groups.abs().amax(-1) / groups.new_tensor(127.0) if bits == 8 else _furthest_from_zero(groups) / -8
    scale = round_scale(exact)
    inverse = 1 / exact
    # The inverse is not finite if all values of a group are 0, or so small that its scale is 0.
    scaled = groups * inverse.where(inverse.isfinite(), 0.0)[..., None]
    codes = _rounded_away(scaled) if bits == 8 else scaled.add_(8.5).trunc_().clamp_(0, 15).sub_(8)
    return StoredWeight(codes.to(torch.int8).flatten(1), scale, GROUP_SIZE)


def round_scale(exact: Tensor) -> Tensor:
    """Round the scales of a quantised weight to float16 precision, and return them in float32. Raises ValueError if a
    result is not finite."""
    scale = exact.half().float()
    if not scale.isfinite().all():
        raise ValueError("it holds numbers that are not finite, or too large")
    return scale


def _furthest_from_zero(groups: Tensor) -> Tensor:
    """Return the value with the largest absolute value in each group, with its sign. If several absolute values are
    equal, the first value is returned."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _rounded_away(values: Tensor) -> Tensor:
    """Round values to the nearest integer. A value halfway between two integers is rounded away from 0, as in
    llama.cpp."""
    whole = values.trunc()
    return whole.add_(((values - whole) * 2).trunc_())


def mxfp4_codes(packed: Tensor) -> Tensor:
    """Unpack MXFP4 numbers to int8 codes. A byte contains two MXFP4 numbers. A code is twice the number, because this
    is always an integer. Return the codes as [number of bytes, 2]. The bytes may have any shape."""
    return _PAIRS.view(torch.int16).flatten().index_select(0, packed.flatten().int()).view(torch.int8).view(-1, 2)


def mxfp4_scales(exponents: Tensor, codes: Tensor) -> Tensor:
    """Convert the shared exponents of MXFP4 groups to float32 scales, in the shape of `exponents`. A scale is half the
    power of two that the exponent byte specifies, because `mxfp4_codes` doubles the numbers. The exponent byte 255
    gives NaN.

    Args:
        exponents: the E8M0 bytes.
        codes: the codes of the groups, [*exponents.shape, GROUP_SIZE]. A group of zeros whose scale would not be a
            normal float32 gets the scale 0, which represents the same values.
    """
    scales = _HALVED.index_select(0, exponents.flatten().int()).view(exponents.shape)
    is_tiny = exponents < 2
    if is_tiny.any():
        scales.masked_fill_(is_tiny & ~codes.any(-1), 0.0)
    return scales
