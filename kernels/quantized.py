"""How floats are rounded to codes of few bits, and what the codes of MXFP4 are.

Floats are rounded as llama.cpp does, bit for bit what PyPI `gguf` makes of them: 8 bits are its Q8_0, 4 bits its Q4_0.
Scales are float16 numbers; codes are found by the scale before it is rounded. This is in plain torch, which
`CpuKernels.quantize` is compared with.

MXFP4 are floats of 4 bits (E2M1) in groups of 32 with a power of two in common (E8M0), as the OCP Microscaling Formats
define them: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
All E2M1 numbers are halves of integers: a weight is codes of twice them, by scales of half the powers.
"""

import math

import torch
from torch import Tensor

from pagewire.kernels.weight import HeldFormat, HeldWeight

GROUP_SIZE = 32  # of MXFP4, and of floats that are rounded to codes
BITS = {"int8": 8, "int4": 4}  # that floats are rounded to, by the names that users have for them
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# Of the two numbers of a byte, the one in its lower half first.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)  # [256, 2]
# Of each exponent, whose last stands for no number; ldexp is exact where the powers of torch need not be.
_HALVED = torch.tensor([*(math.ldexp(1.0, exponent - 128) for exponent in range(255)), math.nan])


MXFP4 = HeldFormat(torch.int8, GROUP_SIZE, 4, has_half_scales=True, has_power_scales=True)


def quantized_format(bits: int) -> HeldFormat:
    """Return the format of weights of 8 or 4 bits."""
    return HeldFormat(torch.int8, GROUP_SIZE, bits, has_half_scales=True)


def quantize(values: Tensor, bits: int) -> HeldWeight:
    """Quantise float32 [rows, columns], whose columns are whole groups, to 8 or 4 bits.

    Raises ValueError for what is no finite number, or so large that a scale is none.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    # By a tensor: by a number, torch on a GPU multiplies by its inverse, and the last bit differs.
    exact = groups.abs().amax(-1) / groups.new_tensor(127.0) if bits == 8 else _largest(groups) / -8
    scale = round_scale(exact)
    inverse = 1 / exact
    # All of a group is 0, or so small that its scale is.
    scaled = groups * inverse.where(inverse.isfinite(), 0.0)[..., None]
    codes = _rounded_away(scaled) if bits == 8 else scaled.add_(8.5).trunc_().clamp_(0, 15).sub_(8)
    return HeldWeight(codes.to(torch.int8).flatten(1), scale, GROUP_SIZE)


def round_scale(exact: Tensor) -> Tensor:
    """To float16 numbers. Raises ValueError for what is no finite one."""
    scale = exact.half().float()
    if not scale.isfinite().all():
        raise ValueError("it holds numbers that are not finite, or too large")
    return scale


def _largest(groups: Tensor) -> Tensor:
    """The number of each group that is furthest from 0, with its sign; the first of several."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _rounded_away(values: Tensor) -> Tensor:
    """To the nearest integer, and from halves away from 0."""
    whole = values.trunc()
    return whole.add_(((values - whole) * 2).trunc_())


def mxfp4_codes(packed: Tensor) -> Tensor:
    """Twice the MXFP4 numbers of bytes, int8 [bytes, 2], whatever the shape of the bytes is."""
    return _PAIRS.view(torch.int16).flatten().index_select(0, packed.flatten().int()).view(torch.int8).view(-1, 2)


def mxfp4_scales(exponents: Tensor, codes: Tensor) -> Tensor:
    """Half the powers of two that bytes of MXFP4 stand for, in float32 and of their shape; NaN where they stand for
    none.

    Args:
        codes: of the groups, [*exponents.shape, GROUP_SIZE]. Groups of zeros that have a power below all normal numbers
            are given 0 instead, which means the same.
    """
    scales = _HALVED.index_select(0, exponents.flatten().int()).view(exponents.shape)
    is_tiny = exponents < 2
    if is_tiny.any():
        scales.masked_fill_(is_tiny & ~codes.any(-1), 0.0)
    return scales
