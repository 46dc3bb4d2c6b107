"""The results of a step as one int32 column, so that a device returns them in one copy."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def flatten_to_int32(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one dense int32 tensor, so that a device can return all results of a step in one copy.

    The tensors may contain integers below 2**31, booleans, or float32. The bits of float32 values are kept. If there is
    only one tensor, the result may share its memory.
    """
    flat = [tensor.flatten() for tensor in tensors]
    parts = [part.view(torch.int32) if part.dtype == torch.float32 else part.int() for part in flat]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class ValueReader:
    """A reader of the int32 array into which `flatten_to_int32` has packed the results of a step.

    Read the results in the order in which they were packed.
    """

    def __init__(self, values: NDArray[np.int32]) -> None:
        self._values = values
        self._num_read = 0

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "ValueReader":
        """Return a reader of `tensors`, which must be on the host.

        It reads the same values as a reader of `flatten_to_int32(tensors)`, with fewer torch operations.
        """
        flat = [tensor.numpy().ravel() for tensor in tensors]
        bits = [part.view(np.int32) if part.dtype == np.float32 else part for part in flat]
        return ValueReader(np.concatenate(bits, dtype=np.int32, casting="unsafe"))

    def integers(self, num: int) -> NDArray[np.int32]:
        start = self._num_read
        self._num_read += num
        return self._values[start : self._num_read]

    def floats(self, num: int) -> NDArray[np.float32]:
        return self.integers(num).view(np.float32)
