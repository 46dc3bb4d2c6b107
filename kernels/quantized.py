"""Weights of few bits, as every format's loader gives them and the CPU kernels pack them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Group sizes are multiples of this.
GROUP = 16


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """What is known of a quantised weight before it is read. It may turn out smaller."""

    bits: int  # of a code: more than 4 are kept in 8
    group_size: int  # a multiple of 16
    has_half_scales: bool  # scales and minima are float16 numbers
    has_minima: bool

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """Estimate the memory that a weight takes in the panels of the CPU kernels."""
        scales = (2 if self.has_half_scales else 4) * (2 if self.has_minima else 1)
        groups = -(-in_size // min(self.group_size, 32))
        return out_size * (in_size * (4 if self.bits <= 4 else 8) // 8 + groups * scales)

    @staticmethod
    def join(formats: Sequence["QuantizedFormat"]) -> "QuantizedFormat":
        """Return the format of weights one below the other."""
        return QuantizedFormat(
            max(each.bits for each in formats),
            math.gcd(*(each.group_size for each in formats)),
            all(each.has_half_scales for each in formats),
            any(each.has_minima for each in formats),
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_size, in_size] in groups of `group_size` inputs: `scale * codes - minimum`, in float32.

    Attributes:
        codes: int8 [out_size, in_size].
        scale: float32 [out_size, in_size / group_size].
        minimum: float32 of the same shape, what a code of 0 stands below 0; None: nothing.
        group_size: a multiple of 16.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        """Raises ValueError if sizes or dtypes do not fit each other."""
        codes = self.codes
        if codes.dtype != torch.int8 or codes.ndim != 2:
            raise ValueError(f"codes are {codes.dtype} {tuple(codes.shape)}; they must be int8 in two dimensions")
        out_size, in_size = codes.shape
        if self.group_size < GROUP or self.group_size % GROUP:
            raise ValueError(f"groups of {self.group_size} are not served; their size must be a multiple of {GROUP}")
        if in_size % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {in_size} inputs")
        shape = (out_size, in_size // self.group_size)
        for name, values in (("scale", self.scale), ("minimum", self.minimum)):
            if values is not None and (values.dtype != torch.float32 or values.shape != shape):
                raise ValueError(f"{name} is {values.dtype} {tuple(values.shape)}; it must be torch.float32 {shape}")

    def dequantized(self) -> Tensor:
        """The weight in float32, [out_size, in_size]: a product that is rounded, then a difference."""
        groups = self.codes.float().unflatten(1, (-1, self.group_size)) * self.scale[..., None]
        if self.minimum is not None:
            groups = groups - self.minimum[..., None]
        return groups.flatten(1)

    def __getitem__(self, rows: Tensor) -> "QuantizedWeight":
        """Return the weight that has these outputs, in this order."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return QuantizedWeight(self.codes[rows], self.scale[rows], minimum, self.group_size)

    @staticmethod
    def join(weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Return the weight that has the outputs of several, all of as many inputs, one below the other."""
        if len(weights) == 1:
            return weights[0]
        group_size = math.gcd(*(weight.group_size for weight in weights))
        scales = [weight.scale.repeat_interleave(weight.group_size // group_size, 1) for weight in weights]
        minima = None
        if any(weight.minimum is not None for weight in weights):
            minima = torch.cat(
                [
                    torch.zeros_like(scale)
                    if weight.minimum is None
                    else weight.minimum.repeat_interleave(weight.group_size // group_size, 1)
                    for weight, scale in zip(weights, scales, strict=True)
                ]
            )
        return QuantizedWeight(torch.cat([weight.codes for weight in weights]), torch.cat(scales), minima, group_size)
