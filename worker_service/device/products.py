"""Products of a GPU with weights that stay quantised, in the Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.triton import linear, scaled
from pagewire.kernels.triton.experts import Assignment


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct:
    """A product of inputs as they are with codes, or with floats of 8 bits."""

    packed: linear.PackedWeight
    bias: Tensor | None
    computed: torch.dtype  # by the model

    def __call__(self, x: Tensor) -> Tensor:
        return linear.multiply(x, self.packed, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), self.packed.out_size, dtype=torch.float32)
        return linear.multiply(x, self.packed, self.bias, out)

    def take_rows(self, indexes: Tensor) -> Tensor:
        return linear.take_rows(self.packed, indexes, self.computed)


@dataclass(frozen=True, slots=True, eq=False)
class PackedExpertProduct:
    """Such products of experts with their slots."""

    packed: linear.PackedWeight
    biases: Tensor | None
    assign: Callable[[Tensor, torch.dtype], Assignment]  # ids, for products of a dtype

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        return linear.multiply_routed(x, self.packed, self.assign(ids, x.dtype), self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedProduct:
    """A product of inputs that are rounded to 8 bits with a weight of 8 bits of the same kind."""

    weight: scaled.ScaledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return scaled.multiply(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        values = scaled.multiply(x, self.weight, self.bias, torch.float32)
        return values if out is None else out.copy_(values)
