"""Weights in whole numbers with a scale for each group of inputs."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out, in] that means `scale * code - minimum`, computed in float32. Groups are consecutive inputs of
    one output, and divide them."""

    codes: Tensor  # int8 [out, in]
    scale: Tensor  # float32 [out, in / group_size]
    minimum: Tensor | None  # float32, shaped as the scale; None: 0
    group_size: int

    def dequantized(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        groups = self.codes.unflatten(1, (-1, self.group_size)).float().mul_(self.scale[:, :, None])
        if self.minimum is not None:
            groups.sub_(self.minimum[:, :, None])
        return groups.flatten(1)
