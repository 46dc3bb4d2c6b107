"""Rounding of floats to codes of 8, 6 and 4 bits, and the codes of MXFP4.

Each group of 32 inputs has a scale. 8 bits are rounded as in llama.cpp's Q8_0, bit for bit like the PyPI package
`gguf`. 6 bits are rounded in the same way. 4 bits also have a minimum. Scale and minimum are searched as in llama.cpp's
K-quants: several first scales give codes, each of which gives a scale and a minimum by weighted least squares, and the
best are kept (after `make_qkx2_quants` of https://github.com/ggml-org/llama.cpp). Scales and minima are integers of 8
bits with a factor for each 256 inputs.

The code is plain torch. It specifies every bit of `CpuKernels.quantize`. Sums are of float64 numbers whose products are
exact, so that fused multiply-adds do not change them.

MXFP4 numbers are 4-bit floats (E2M1) in groups of 32 that share a power of two (E8M0), as the OCP Microscaling Formats
define them (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). All E2M1 numbers
are multiples of one half. A weight therefore stores twice the numbers as integer codes, and half the powers as scales.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels.weight import BLOCK, StoredFormat, StoredWeight

GROUP_SIZE = 32  # inputs per scale, in MXFP4 and in rounded floats
BITS = {"int8": 8, "int4": 4}  # bits of most codes, by the names of --quantization
_NUM_PARTS = 8  # interleaved parts of a sum over a group
_GROUPS_OF_BLOCK = BLOCK // GROUP_SIZE
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
# The number in the lower half of a byte comes first.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), dim=1)  # [256, 2]
# By exponent byte; the last byte means NaN. `ldexp` is exact, and the powers of torch may not be.
_HALVED = torch.tensor([*(math.ldexp(1.0, exponent - 128) for exponent in range(255)), math.nan])


MXFP4 = StoredFormat(torch.int8, GROUP_SIZE, 4, has_half_scales=True, has_power_scales=True)


def quantized_format(bits: int) -> StoredFormat:
    """Return the memory format of weights that are quantised to codes of 8, 6 or 4 bits in groups of GROUP_SIZE
    inputs."""
    return StoredFormat(torch.int8, GROUP_SIZE, bits, has_half_scales=True, has_minima=bits == 4, has_factors=bits == 4)


def quantize(values: Tensor, bits: int, importance: Tensor | None = None) -> StoredWeight:
    """Quantise a weight, float32 [rows, columns], to codes of 8, 6 or 4 bits in groups of GROUP_SIZE columns. The
    number of columns must be a multiple of GROUP_SIZE, and of BLOCK for 4 bits.

    `importance`, float32 [columns], says how much errors of each column count; all count the same by default. Only 4
    bits use it. Raises ValueError if a value is not finite, or if a scale is too large for float16.
    """
    if bits == 4:
        scales = round_scales(*search_scales(values, importance))
        return replace(scales, values=round_codes(values, scales.without_factors()))
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    # Divide by a tensor: for division by a number, torch on a GPU multiplies by the inverse, and the last bit differs.
    exact = groups.abs().amax(-1) / groups.new_tensor(127.0) if bits == 8 else _furthest_from_zero(groups) / -32
    scale = round_scale(exact)
    scaled = groups * _inverse(exact)[..., None]
    codes = _rounded_away(scaled) if bits == 8 else scaled.round_().clamp_(max=31)
    return StoredWeight(codes.to(torch.int8).flatten(1), scale, GROUP_SIZE)


def round_scale(exact: Tensor) -> Tensor:
    """Round the scales of a quantised weight to float16 precision, and return them in float32. Raises ValueError if a
    result is not finite."""
    scale = exact.half().float()
    if not scale.isfinite().all():
        raise ValueError("it holds numbers that are not finite, or too large")
    return scale


def search_scales(values: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales and minima for codes of 4 bits, float32 [rows, groups], before they are rounded. A group with a
    value that is not finite has a scale that is not finite.

    The weight of a value in the fit is its absolute value plus the root mean square of its group, times the importance
    of its column, as with llama.cpp's importance matrices.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    size = (_sum(groups.double().square()) / GROUP_SIZE).sqrt().float()
    weights = size[..., None] + groups.abs()
    weights = (weights if importance is None else weights * importance.view(-1, GROUP_SIZE)).double()
    weighted = weights * groups
    lowest, highest = groups.amin(-1).clamp(max=0.0), groups.amax(-1)
    sum_w, sum_wx = _sum(weights), _sum(weighted)
    best = torch.full_like(sum_w, -math.inf)
    scale, minimum = groups.abs().amax(-1), torch.zeros_like(size)  # if all gains overflow, the scale is too large
    for first in range(140, 161):  # in tenths, the largest code before it is rounded
        inverse = groups.new_tensor(first) / groups.new_tensor(10.0) / (highest - lowest)
        inverse = inverse.where(inverse.isfinite(), 0.0)
        codes = ((groups - lowest[..., None]) * inverse[..., None]).round_().clamp_(max=15).double()
        found, offset, gain = _fit(
            sum_w, sum_wx, _sum(weights * codes), _sum(weights * codes * codes), _sum(weights * codes * groups)
        )
        is_better = gain > best
        best = gain.where(is_better, best)
        scale = found.float().where(is_better, scale)
        minimum = (0.0 - offset).float().where(is_better, minimum)
    return scale.where(groups.isfinite().all(-1), math.nan), minimum


def _fit(sum_w: Tensor, sum_wx: Tensor, sum_wl: Tensor, sum_wll: Tensor, sum_wlx: Tensor) -> tuple[Tensor, ...]:
    """Return the scale and the offset with the least weighted square error for given codes, and by how much they reduce
    the error of zeros. Offsets are not positive.

    The arguments are sums over groups, float64: of weights w, values x and codes l.
    """
    determinant = sum_w * sum_wll - sum_wl * sum_wl
    scale = (sum_w * sum_wlx - sum_wx * sum_wl) / determinant
    offset = (sum_wll * sum_wx - sum_wl * sum_wlx) / determinant
    # All codes are equal if the determinant is 0.
    is_fitted = (determinant > sum_w * sum_wll * 1e-9) & (offset <= 0)
    has_codes = sum_wll > 0
    scale = scale.where(is_fitted, (sum_wlx / sum_wll).where(has_codes, 0.0))
    offset = offset.where(is_fitted, (sum_wx / sum_w).where(~has_codes & (sum_w != 0), 0.0))
    return scale, offset, scale * sum_wlx + offset * sum_wx


def round_scales(scale: Tensor, minimum: Tensor) -> StoredWeight:
    """Round the scales and minima of a weight to the form in which they are stored, as a weight whose codes are all 0.
    Raises ValueError if a result is not finite."""
    rows, num_groups = scale.shape
    codes = torch.zeros(rows, num_groups * GROUP_SIZE, dtype=torch.int8, device=scale.device)
    scales, scale_factor = _with_factor(scale)
    # Where a scale is too small to be stored, all codes are 0. A minimum alone would move the values away from 0.
    minima, minimum_factor = _with_factor(minimum.where((scales != 0) | (scale == 0), 0.0))
    return StoredWeight(codes, scales, GROUP_SIZE, minima, scale_factor=scale_factor, minimum_factor=minimum_factor)


def _with_factor(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers as integers from -127 to 127 with a factor for each block of inputs."""
    blocks = exact.unflatten(1, (-1, _GROUPS_OF_BLOCK))
    exact = blocks.abs().amax(-1) / blocks.new_tensor(127.0)
    rounded = exact.half()
    # Rounded up: the bits of the next positive number are greater by one.
    factor = round_scale((rounded.view(torch.int16) + (rounded.float() < exact)).view(torch.float16).float())
    integers = blocks / factor[..., None]
    return integers.where(integers.isfinite(), 0.0).round_().clamp_(-127, 127).flatten(1), factor


def round_codes(values: Tensor, scales: StoredWeight) -> Tensor:
    """Round values to the nearest codes of 4 bits, int8 [rows, columns], for scales and minima without factors."""
    assert scales.scale is not None
    assert scales.minimum is not None
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    scaled = (groups + scales.minimum[..., None]) / scales.scale[..., None]
    codes = scaled.where(scales.scale[..., None] != 0, 0.0).round_().clamp_(0, 15)
    return codes.to(torch.int8).flatten(1)


def _sum(terms: Tensor) -> Tensor:
    """Sum up float64 terms [..., GROUP_SIZE]: first every eighth term, in order, then the upper half of these sums is
    added to the lower half until one is left."""
    parts = terms.unflatten(-1, (-1, _NUM_PARTS))
    total = parts[..., 0, :]
    for index in range(1, parts.shape[-2]):
        total = total + parts[..., index, :]
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, dim=-1)
        total = lower + upper
    return total.squeeze(-1)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, or 0 if that is not finite because all values of a group are 0 or very small."""
    inverse = 1 / scale
    return inverse.where(inverse.isfinite(), 0.0)


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
