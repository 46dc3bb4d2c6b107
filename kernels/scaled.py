"""Products of activations rounded to 8 bits with weights of 8 bits (W8A8), in plain torch: int8 by int8, and FP8
(e4m3) by FP8. These are the specifications of what `kernels/triton/scaled.py` computes.

Activations are rounded as they come: each row by its own largest absolute value, as vLLM's dynamic scales of tokens
are, or each 128 inputs of a row by theirs, as DeepSeek-V3's are (2024, https://arxiv.org/abs/2412.19437, 3.3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK", "LARGEST", "MAX_INPUTS", "MIN_SCALE", "RoundedRows", "multiply", "round_rows"]

BLOCK = 128  # inputs and outputs of a weight that have a scale together
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
MIN_SCALE = 2.0**-126  # the least normal float32
MAX_INPUTS = 2**31 // (127 * 128) // BLOCK * BLOCK  # whose products of int8 an int32 holds


class RoundedRows(NamedTuple):
    """Rows that mean `values * scale`.

    Attributes:
        values: int8 or float8_e4m3fn [T, in_size].
        scale: float32 [T, ceil(in_size / group_size)].
    """

    values: Tensor
    scale: Tensor


def round_rows(x: Tensor, dtype: torch.dtype, group_size: int) -> RoundedRows:
    """Rows rounded to 8 bits, symmetrically, each group of inputs by its own largest absolute value.

    A group's scale is `max|x| / 127` (int8) or `max|x| / 448` (FP8), divided in float32, and 2^-126 where that is less,
    so that zeros are zeros. Its values are `x / scale`, divided in float32, rounded to the nearest and to even. Where a
    group holds an infinity or NaN, its scale is NaN and its values are 0: products of its row are NaN.

    Args:
        x: [T, in_size], float16, bfloat16 or float32.
        dtype: int8 or float8_e4m3fn.
        group_size: consecutive inputs of a row that have a scale together; the last group may be shorter.
    """
    largest = LARGEST[dtype]
    in_size = x.shape[1]
    num_groups = -(-in_size // group_size)
    padded = torch.nn.functional.pad(x.float(), (0, num_groups * group_size - in_size))
    groups = padded.unflatten(1, (num_groups, group_size))
    peaks = groups.abs().amax(2)
    # By a tensor: by a number, torch on a GPU multiplies by its inverse, and the last bit differs.
    scale = torch.where(peaks.isfinite(), (peaks / peaks.new_tensor(largest)).clamp_min(MIN_SCALE), torch.nan)
    quotients = (groups / scale[..., None]).nan_to_num(0.0).clamp(-largest, largest).flatten(1)[:, :in_size]
    return RoundedRows((quotients.round() if dtype == torch.int8 else quotients).to(dtype), scale)


def multiply(
    rounded: RoundedRows,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x W^T + b of rounded rows and a weight of the same dtype.

    With a scale for each output, it is `sum * row's scale * output's scale + b`, in this order, where `sum` is of
    int8 exact, in int32, then rounded to float32; and of FP8 in float32. With scales of blocks, it is the sum of
    `sum * (group's scale * block's scale)` over blocks of inputs, in rising order, `+ b`, in float32. Either is
    rounded to the output's dtype once. In which order a sum of products of FP8 is taken is not specified.

    Args:
        rounded: [T, in_size], with one scale a row, or, where the weight's are of blocks, one for each 128 inputs.
        values: int8 or float8_e4m3fn [out_size, in_size].
        scale: float32 [out_size], or of FP8 in blocks [ceil(out_size / 128), ceil(in_size / 128)].
        bias: [out_size].

    Returns:
        [T, out_size].
    """
    if scale.dim() == 1:
        output = _sum_products(rounded.values, values) * rounded.scale * scale
    else:
        of_outputs = scale.repeat_interleave(BLOCK, 0)[: len(values)]
        output = torch.zeros(len(rounded.values), len(values), device=values.device)
        for block in range(scale.shape[1]):
            inputs = slice(block * BLOCK, (block + 1) * BLOCK)
            factors = rounded.scale[:, block, None] * of_outputs[:, block]
            output = output + _sum_products(rounded.values[:, inputs], values[:, inputs]) * factors
    if bias is not None:
        output = output + bias.float()
    return output.to(output_dtype)


def _sum_products(rows: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, out_size]."""
    if rows.dtype == torch.int8:  # which float64 sums up exactly, on every device
        return (rows.double() @ weight.double().T).float()
    return rows.float() @ weight.float().T
