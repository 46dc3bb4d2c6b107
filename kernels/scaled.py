"""The specification of W8A8 matrix multiplication in plain torch: activations rounded to 8 bits times 8-bit weights.

Both operands are int8, or both are FP8 (e4m3). `kernels/triton/scaled.py` implements it. Activations are rounded
dynamically: each row by its own largest absolute value, like vLLM's dynamic per-token scales, or each 128 inputs of a
row by their own largest, like DeepSeek-V3 (2024, https://arxiv.org/abs/2412.19437, 3.3.2).
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK", "LARGEST", "MAX_INPUTS", "MIN_SCALE", "RoundedRows", "multiply", "round_rows"]

BLOCK = 128  # consecutive inputs and consecutive outputs of a weight that share a scale
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
MIN_SCALE = 2.0**-126  # the least normal float32
MAX_INPUTS = 2**31 // (127 * 128) // BLOCK * BLOCK  # inputs whose int8 dot product fits in an int32


class RoundedRows(NamedTuple):
    """Rows of activations rounded to 8 bits, each with one scale or one scale per group of inputs. The represented
    value is `values * scale`.

    Attributes:
        values: int8 or float8_e4m3fn [T, in_size].
        scale: float32 [T, ceil(in_size / group_size)].
    """

    values: Tensor
    scale: Tensor


def round_rows(x: Tensor, dtype: torch.dtype, group_size: int) -> RoundedRows:
    """Round rows of activations to 8 bits, symmetrically around 0. Each group of inputs is scaled by its own largest
    absolute value.

    The scale of a group is `max|x| / 127` (int8) or `max|x| / 448` (FP8), divided in float32, and at least 2^-126 so
    that zeros stay zeros. Its values are `x / scale`, divided in float32 and rounded to nearest even. If a group
    contains an infinity or NaN, its scale is NaN and its values are 0, so every output of its row is NaN.

    Args:
        x: [T, in_size], float16, bfloat16 or float32.
        dtype: int8 or float8_e4m3fn.
        group_size: number of consecutive inputs of a row that share a scale; the last group may be shorter.
    """
    largest = LARGEST[dtype]
    in_size = x.shape[1]
    num_groups = -(-in_size // group_size)
    padded = torch.nn.functional.pad(x.float(), (0, num_groups * group_size - in_size))
    groups = padded.unflatten(1, (num_groups, group_size))
    peaks = groups.abs().amax(2)
    # Divide by a tensor: for division by a number, torch on a GPU multiplies by the inverse, and the last bit differs.
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
    """Return x W^T + b for activations x rounded to 8 bits and an 8-bit weight W of the same dtype.

    With one scale per output, the result is `sum * row's scale * output's scale + b`, in this order. For int8 the `sum`
    is exact, in int32, and then rounded to float32. For FP8 the `sum` is in float32. With scales of blocks, the result
    is the sum of `sum * (group's scale * block's scale)` over blocks of inputs in ascending order, `+ b`, in float32.
    Both results are rounded once to the output's dtype. The order of additions within an FP8 `sum` is not specified.

    Args:
        rounded: [T, in_size], with one scale per row; with scales of blocks, one scale for each 128 inputs.
        values: int8 or float8_e4m3fn [out_size, in_size].
        scale: float32 [out_size]; for FP8 in blocks [ceil(out_size / 128), ceil(in_size / 128)].
        bias: [out_size], or None.
        output_dtype: dtype of the result.

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
    """Return the matrix product of activations rounded to 8 bits and weight^T, float32 [T, out_size]. The scales are
    not applied."""
    if rows.dtype == torch.int8:  # float64 sums are exact on every device
        return (rows.double() @ weight.double().T).float()
    return rows.float() @ weight.float().T
