"""A tensor with its strides, as one argument of a kernel: a device gets the fields of a tuple one by one."""

from typing import NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """A tensor whose last dimension is dense, and the distances between elements of all others."""

    data: Tensor
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Strided":
        """A tensor as a kernel takes it."""
        return Strided(tensor, tensor.stride()[:-1])
