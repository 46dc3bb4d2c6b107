"""Weights in floats of 8 bits with a scale for each block of inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

# What each byte means. A look-up is several times as fast as torch's conversion on CPUs.
_FLOATS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A weight [out, in] that means `scale * value`, computed in float32. Blocks are consecutive inputs of one output;
    the last may be shorter."""

    values: Tensor  # float8_e4m3fn [out, in]
    scale: Tensor  # float32 [out, ceil(in / block_size)]
    block_size: int

    def dequantized(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        scale = self.scale.repeat_interleave(self.block_size, 1) if self.scale.shape[1] > 1 else self.scale
        codes = self.values.view(torch.uint8).int()
        return _FLOATS.index_select(0, codes.flatten()).view(codes.shape).mul_(scale[:, : codes.shape[1]])
