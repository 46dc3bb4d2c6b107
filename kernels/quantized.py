"""Weights of few bits, as every format's loader gives them and the CPU kernels pack them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Group sizes are multiples of this.
GROUP = 16


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
