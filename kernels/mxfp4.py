"""MXFP4: floats of 4 bits (E2M1) in groups of 32 with a power of two in common (E8M0), as the OCP Microscaling Formats
define them: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf

All E2M1 numbers are halves of integers: a weight is codes of twice them, by scales of half the powers.
"""

import math

import torch
from torch import Tensor

from pagewire.kernels.quantized import QuantizedFormat

GROUP_SIZE = 32
FORMAT = QuantizedFormat(4, GROUP_SIZE, has_half_scales=True, has_minima=False, has_power_scales=True)
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# Of the two numbers of a byte, the one in its lower half first.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)  # [256, 2]
# Of each exponent, whose last stands for no number; ldexp is exact where the powers of torch need not be.
_HALVED = torch.tensor([*(math.ldexp(1.0, exponent - 128) for exponent in range(255)), math.nan])


def doubled_codes(packed: Tensor) -> Tensor:
    """Twice the numbers of bytes, int8 [bytes, 2], whatever the shape of the bytes is."""
    return _PAIRS.view(torch.int16).flatten().index_select(0, packed.flatten().int()).view(torch.int8).view(-1, 2)


def halved_scales(exponents: Tensor, codes: Tensor) -> Tensor:
    """Half the powers of two that bytes stand for, in float32 and of their shape; NaN where they stand for none.

    Args:
        codes: of the groups, [*exponents.shape, GROUP_SIZE]. Groups of zeros that have a power below all normal numbers
            are given 0 instead, which means the same.
    """
    scales = _HALVED.index_select(0, exponents.flatten().int()).view(exponents.shape)
    is_tiny = exponents < 2
    if is_tiny.any():
        scales.masked_fill_(is_tiny & ~codes.any(-1), 0.0)
    return scales
