"""The results of a step as one column of int32, so that they cross from a device in one piece."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def flatten_to_int32(tensors: Sequence[Tensor]) -> Tensor:
    """One dense tensor of integers below 2**31, booleans and, bit by bit, float32. It may be memory of the only one."""
    flat = [tensor.flatten() for tensor in tensors]
    parts = [part.view(torch.int32) if part.dtype == torch.float32 else part.int() for part in flat]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class ValueReader:
    """Reads what was flattened, one tensor after the other."""

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values
        self._num_read = 0

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "ValueReader":
        """Return a reader of what `flatten_to_int32` would make of tensors on the host, in fewer operations of
        torch."""
        flat = [tensor.numpy().ravel() for tensor in tensors]
        bits = [part.view(np.int32) if part.dtype == np.float32 else part for part in flat]
        return ValueReader(np.concatenate(bits, dtype=np.int32, casting="unsafe"))

    def integers(self, num: int) -> NDArray[np.int32]:
        start = self._num_read
        self._num_read += num
        return self._values[start : self._num_read]

    def floats(self, num: int) -> NDArray[np.float32]:
        return self.integers(num).view(np.float32)
