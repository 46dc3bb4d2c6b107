"""Pinned memory between the host and the streams: what a step takes along, and what comes back of it."""

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
    """The size of a column with what is left vacant behind it."""
    return size + -size % ALIGNMENT


class Upload:
    """Columns of one step, packed, each from a multiple of `ALIGNMENT` on: integers and, bit by bit, float32."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []
        self.size = 0  # in int32

    def add(self, values: ArrayLike) -> slice:
        """Integers, of larger ones the lower 32 bits, or float32, flattened; returns where they will lie."""
        column = np.asarray(values).ravel()
        column = column.view(np.int32) if column.dtype == np.float32 else column.astype(np.int32, copy=False)
        start, num_vacant = self.size, aligned(column.size) - column.size
        self._parts.append(column)
        if num_vacant:
            self._parts.append(np.zeros(num_vacant, np.int32))
        self.size += column.size + num_vacant
        return slice(start, start + column.size)

    def write(self, target: NDArray[np.int32]) -> None:
        """`target`: [size]."""
        np.concatenate(self._parts, out=target)


@dataclass(slots=True)
class OnDevice:
    """A tensor that an operation leaves to those behind it: it is there once they are carried out."""

    _tensor: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "read before the operation that makes it"
        return self._tensor


@dataclass(slots=True)
class PinnedBuffer:
    """Host memory as the device and as the host see it: [size] int32."""

    tensor: Tensor
    array: NDArray[np.int32]

    @staticmethod
    def allocate(device: Device, size: int) -> "PinnedBuffer":
        """At least `size`."""
        tensor = device.pinned((max(_MIN_BUFFER_SIZE, 1 << (size - 1).bit_length()),), torch.int32)
        return PinnedBuffer(tensor, tensor.numpy())


class UploadRing:
    """Sends a step's upload to the device while that of the step before may still be on its way.

    A buffer is written again only when the device has read it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ring: deque[tuple[PinnedBuffer, torch.cuda.Event | None]] = deque(
            (PinnedBuffer.allocate(device, 1), None) for _ in range(2)
        )

    def send(self, upload: Upload, target: Tensor | None = None) -> OnDevice:
        """Copy it on the compute stream to the target, [size] int32, or to a tensor of its own."""
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
    """Buffers for what comes back, each in use until it is given back. The deque lets two threads do that."""

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
        """It has been read, and no operation writes it any more."""
        self._free.append(buffer)
