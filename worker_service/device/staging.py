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
    """Return the size of a column rounded up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


class Upload:
    """The packed columns of one step: integers, and the bits of float32 values, as int32.

    Each column starts at a multiple of `ALIGNMENT`.
    """

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self.size = 0  # in int32

    def add(self, values: ArrayLike) -> slice:
        """Add a column of integers or float32, flattened, and return its place.

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
        """Write the columns to `target` [size]."""
        np.concatenate(self._parts, out=target)


@dataclass(slots=True)
class OnDevice:
    """A tensor that one operation leaves for later operations. It is available once that operation has run."""

    _tensor: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "read before the operation that makes it"
        return self._tensor


@dataclass(slots=True)
class PinnedBuffer:
    """Pinned host memory as a tensor and as an array: [size] int32."""

    tensor: Tensor
    array: NDArray[np.int32]

    @staticmethod
    def allocate(device: Device, size: int) -> "PinnedBuffer":
        """Allocate a buffer of at least `size` int32."""
        tensor = device.pinned((max(_MIN_BUFFER_SIZE, 1 << (size - 1).bit_length()),), torch.int32)
        return PinnedBuffer(tensor, tensor.numpy())


class UploadRing:
    """Two pinned buffers for uploads, so that a step's upload can start while the previous upload is in progress.

    A buffer is reused only after the device has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ring: deque[tuple[PinnedBuffer, torch.cuda.Event | None]] = deque(
            (PinnedBuffer.allocate(device, 1), None) for _ in range(2)
        )

    def send(self, upload: Upload, target: Tensor | None = None) -> OnDevice:
        """Copy the upload, on the compute stream, to `target` [size] int32 or to a new tensor."""
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
    """Pinned buffers for results. A buffer is in use until it is given back.

    Two threads take and give back buffers; the deque makes that safe.
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
        """Return a buffer to the free list. It has been read, and no operation writes it any more."""
        self._free.append(buffer)
