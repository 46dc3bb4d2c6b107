"""Products of a GPU with weights that stay quantised, in the Triton kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.float8 import Float8Weight
from pagewire.kernels.quantized import QuantizedWeight
from pagewire.kernels.triton import linear, scaled


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct:
    """A product of inputs as they are with codes, or with floats of 8 bits."""

    packed: linear.PackedWeight
    bias: Tensor | None
    computed: torch.dtype  # by the model

    def __call__(self, x: Tensor) -> Tensor:
        return linear.multiply(x, self.packed, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        return _written(linear.multiply(x, self.packed, self.bias, torch.float32), out)

    def take_rows(self, indexes: Tensor) -> Tensor:
        return linear.take_rows(self.packed, indexes, self.computed)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedProduct:
    """A product of inputs that are rounded to 8 bits with a weight of 8 bits of the same kind."""

    weight: scaled.ScaledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return scaled.multiply(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        return _written(scaled.multiply(x, self.weight, self.bias, torch.float32), out)


def prepare_quantized(
    weight: QuantizedWeight | Float8Weight,
    bias: Tensor | None,
    computed: torch.dtype,
    device: torch.device,
    *,
    rounds_inputs: bool,
) -> PackedProduct | RoundedProduct:
    """Inputs are rounded where the weight was made for that, and there is such a product."""
    values_dtype = torch.int8 if isinstance(weight, QuantizedWeight) else torch.float8_e4m3fn
    if rounds_inputs and scaled.is_supported(device, values_dtype):
        packed = scaled.pack(weight, device)
        if packed is not None:
            return RoundedProduct(packed, bias)
    return PackedProduct(linear.pack(weight, device), bias, computed)


def _written(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)
