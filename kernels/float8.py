"""Weights in floats of 8 bits with a scale for each block of inputs."""

from dataclasses import dataclass

from torch import Tensor


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
        return self.values.float().mul_(scale[:, : self.values.shape[1]])
