"""Pinned memory between the host and the streams: uploads of a step's inputs, and buffers for its results."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagewire.kernels.gathering import ALIGNMENT
from worker_service.streams import Device

_MIN_BUFFER_SIZE = 1 << 12  # in int32


def aligned(size: int) -> int:
    """Return `size`, in int32 elements, rounded up to a multiple of `ALIGNMENT`.

    Columns of an upload are padded to such sizes, so that all columns have the same alignment. Triton would compile a
    kernel again for inputs with another alignment.
    """
    return size + -size % ALIGNMENT


class Upload:
    """The inputs of one step, packed into one int32 array, so that a single copy sends them to the GPU.

    Each column of the array starts at a multiple of `ALIGNMENT`. The bits of float32 values are kept unchanged.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self.size = 0  # in int32

    def add(self, values: ArrayLike) -> slice:
        """Add a column of integers or float32 values, flattened. Return the slice of the upload that contains it.

        Of larger integers, only the lower 32 bits are kept. The bits of float32 values are kept unchanged.
        """
        column = np.asarray(values).ravel()
        column = column.view(np.int32) if column.dtype == np.float32 else column.astype(np.int32, copy=False)
        start, num_vacant = self.size, aligned(column.size) - column.size
        self._parts.append(column)
        if num_vacant:
            self._parts.append(np.zeros(num_vacant, np.int32))
        self.size += column.size + num_vacant
        return slice(start, start + column.size)

    def write(self, target: NDArray[np.int32]) -> None:
        """Write the packed columns to the int32 array `target`, whose length is `size`."""
        np.concatenate(self._parts, out=target)


@dataclass(slots=True)
class OnDevice:
    """A GPU tensor that one operation on a CUDA stream creates and later operations on the stream read.

    The tensor is set when the operation that creates it runs.
    """

    _tensor: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "read before the operation that makes it"
        return self._tensor


@dataclass(slots=True)
class PinnedBuffer:
    """Page-locked (pinned) host memory of int32 values, as a torch tensor and as a numpy array of the same memory."""

    tensor: Tensor
    array: NDArray[np.int32]

    @staticmethod
    def allocate(device: Device, size: int) -> "PinnedBuffer":
        """Allocate pinned host memory for at least `size` int32 values."""
        tensor = device.pinned((max(_MIN_BUFFER_SIZE, 1 << (size - 1).bit_length()),), torch.int32)
        return PinnedBuffer(tensor, tensor.numpy())


class UploadRing:
    """Two pinned host buffers from which step inputs are copied to the GPU.

    With two buffers, a step's upload can start while the previous upload is in progress. A buffer is reused only after
    the GPU has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ring: deque[tuple[PinnedBuffer, torch.cuda.Event | None]] = deque(
            (PinnedBuffer.allocate(device, 1), None) for _ in range(2)
        )

    def send(self, upload: Upload, target: Tensor | None = None) -> OnDevice:
        """Enqueue the copy of a step's inputs to the GPU on the compute stream. Return the tensor that will have them.

        The copy writes to `target` [size] int32, or to a new tensor if `target` is None. If both pinned buffers are in
        use, this waits for the older upload.
        """
        buffer, read = self._ring.popleft()
        if read is not None:
            read.synchronize()
        if len(buffer.array) < upload.size:
            buffer = PinnedBuffer.allocate(self._device, upload.size)
        upload.write(buffer.array[: upload.size])
        packed = OnDevice()
        source = buffer.tensor[: upload.size]

        def copy() -> None:
            if target is None:
                packed.put(source.to(self._device.torch_device, non_blocking=True, copy=True))
            else:
                packed.put(target.copy_(source, non_blocking=True))

        self._device.compute.run(copy)
        self._ring.append((buffer, self._device.compute.record()))
        return packed


class ResultBuffers:
    """A pool of pinned host buffers that receive the results of steps from the GPU.

    `take` returns an unused buffer, and `give_back` returns it to the pool. Two threads call these methods, which the
    deque makes safe.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[PinnedBuffer] = deque()

    def take(self, size: int) -> PinnedBuffer:
        try:
            buffer = self._free.popleft()
        except IndexError:
            return PinnedBuffer.allocate(self._device, size)
        return buffer if len(buffer.array) >= size else PinnedBuffer.allocate(self._device, size)

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Return a buffer to the pool for reuse.

        Call this when the buffer's results have been read and no GPU operation writes to the buffer.
        """
        self._free.append(buffer)
