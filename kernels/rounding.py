"""Rounds floats to codes with a scale for each group, as llama.cpp does: bit for bit what PyPI `gguf` makes of them.

8 bits are its Q8_0, 4 bits its Q4_0. Scales are float16 numbers; codes are found by the scale before it is rounded.
This is in plain torch, which `CpuKernels.quantize` is compared with.
"""

import torch
from torch import Tensor

from pagewire.kernels.quantized import QuantizedFormat, QuantizedWeight

GROUP_SIZE = 32
BITS = {"int8": 8, "int4": 4}  # by the names that users have for them


def quantized_format(bits: int) -> QuantizedFormat:
    """Return the format of weights of 8 or 4 bits."""
    return QuantizedFormat(bits, GROUP_SIZE, has_half_scales=True, has_minima=False)


def quantize(values: Tensor, bits: int) -> QuantizedWeight:
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
    return QuantizedWeight(codes.to(torch.int8).flatten(1), scale, None, GROUP_SIZE)


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
