"""Checkpoint directories as Hugging Face publishes them: config.json and safetensors files. Pickle files are never
loaded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.checkpoint_files import (
    CONFIG_FILE,
    FLOAT_BYTES,
    CheckpointError,
    TensorHeader,
    read_headers,
)
from pagewire.network.stacks import StackedPart, Stacks, find_part, unstacked_names

FLOATS = {"F32": StoredFormat(torch.float32), "F16": StoredFormat(torch.float16), "BF16": StoredFormat(torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part to read from a checkpoint's tensor of shape `shape`, and the target tensor to fill. An empty `index`
    means the whole tensor, which then has the shape of the target."""

    target: Tensor
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = ()

    def rows_and_columns(self) -> tuple[slice, ...]:
        """Return the row slice and the column slice to read from a matrix."""
        return (*self.index, slice(None), slice(None))[:2]

    def transposed(self) -> "Piece":
        """Return the piece for a checkpoint that stores this matrix transposed."""
        index = self.index and (*self.index, slice(None))[1::-1]
        return replace(self, target=self.target.t(), shape=self.shape[::-1], index=index)


class Tensors(ABC):
    """A source of a model's weights, by name. A weight of the model may be stored as several tensors. By default a
    weight is one tensor of floats, and it is read directly into its target."""

    names: frozenset[str]  # tensors known in advance; each of them must have a place in the model
    # Names of the formats of quantised weights, for log lines; empty: no weight is quantised.
    formats: tuple[str, ...] = ()

    def stored_names(self, name: str) -> frozenset[str]:
        """Return the names of the tensors that store a weight, whether or not they exist."""
        return frozenset((name,))

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format in which a weight with `in_size` inputs can be kept in memory. Return None if the weight is
        missing, or if its format cannot be kept, for example because `in_size` would cut a group."""
        return None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return the most memory in bytes, besides the target, needed to read a weight with `num_elements` elements."""
        return 0

    @abstractmethod
    def check(self, name: str, piece: Piece) -> None:
        """Raise CheckpointError if no stored weight fits the piece, and ValueError if the weight cannot be cut as
        requested. The target of the piece may be without memory (a meta tensor)."""

    @abstractmethod
    def copy(self, name: str, piece: Piece) -> None:
        """Fill the target of a piece that has passed `check`. Raises CheckpointError if a file cannot be read."""

    def quantized(self, name: str, piece: Piece) -> StoredWeight:
        """Return the part of a quantised weight that a piece describes. The piece must have passed `check`; its target
        is not written. If groups of codes cannot represent the weight, the result is in float32, even though `format`
        reports another format."""
        raise AssertionError(f"{name} is not quantised")


class Checkpoint(Tensors):
    """The tensors of a checkpoint directory, by name. Opening it reads only the headers; each tensor is read on
    request."""

    def __init__(self, path: Path, stacks: Stacks | None = None) -> None:
        """Read the headers of all tensors in the directory `path`. `stacks` describes tensors that may contain the
        weights of all experts; each expert's part gets a name of its own. Raises CheckpointError if there are no
        safetensors files, if the index names a missing file, or if a file is not safetensors."""
        self.path = path
        self._headers = read_headers(path)
        unstacked = {
            name: frozenset(unstacked_names(stacks or {}, name, header)) for name, header in self._headers.items()
        }
        # If an expert's tensor is also stored by itself, the stack that contains it has no place in the model.
        own_names = [frozenset((name,)) if names & self._headers.keys() else names for name, names in unstacked.items()]
        self.names = frozenset().union(*own_names)
        self._stacks = {} if self.names == self._headers.keys() else stacks or {}

    def header(self, name: str) -> TensorHeader:
        """Return the header of an existing tensor."""
        part = self._part(name)
        return self._headers[name] if part is None else part.header(self._headers[part.stack])

    def described(self, name: str) -> str:
        """Return a tensor's name as it appears in the files, whether or not the tensor exists."""
        part = self._part(name)
        return name if part is None else part.describe()

    def _part(self, name: str) -> StackedPart | None:
        return None if name in self._headers else find_part(self._stacks, name)

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format in which a weight with `in_size` inputs can be kept in memory. See `Tensors.format`."""
        return FLOATS.get(self.header(name).dtype) if name in self.names else None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return the most memory in bytes, besides the target, needed to read a weight with `num_elements` elements.
        See `Tensors.working_bytes`. Files are read directly into their targets, except for interleaved projections."""
        part = self._part(name)
        return 0 if part is None else part.num_turns * num_elements * torch.float32.itemsize

    def check(self, name: str, piece: Piece) -> None:
        """Raise CheckpointError if no stored weight fits the piece, and ValueError if the weight cannot be cut as
        requested. See `Tensors.check`."""
        expected = list(piece.shape or piece.target.shape)
        described = self.described(name)
        if name not in self.names:
            raise CheckpointError(f"tensor {described} is missing in {self.path}; expected shape {expected}")
        header = self.header(name)
        if list(header.shape) != expected:
            shapes = f"shape {list(header.shape)}, expected {expected}"
            raise CheckpointError(f"tensor {described} in {header.file} has {shapes} from {CONFIG_FILE}")
        if header.dtype not in FLOAT_BYTES:
            raise CheckpointError(
                f"tensor {described} in {header.file} is {header.dtype}, which is not a float type; {CONFIG_FILE} "
                "has no quantization_config that describes it"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Read a tensor, or the requested part of it, into the piece's target, with conversion to the target's dtype
        and device.

        The piece must have passed `check`. Raises CheckpointError if the file cannot be read.
        """
        piece.target.copy_(self.read(name, piece.index))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return an existing tensor, or a part of it. Raises CheckpointError if the file cannot be read."""
        part = self._part(name)
        stored = name if part is None else part.stack
        stored_index = index if part is None else part.index(self._headers[stored], index)
        try:
            file = self._open(self.path / self._headers[stored].file)
            read = file.get_slice(stored)[stored_index] if stored_index else file.get_tensor(stored)
        except SafetensorError as error:
            raise CheckpointError(
                f"tensor {stored} cannot be read from {self._headers[stored].file}: {error}"
            ) from error
        if part is None:
            return read
        of_expert = read[0].t() if part.is_transposed else read[0]
        return of_expert[part.turns]

    @staticmethod
    def _open(file: Path) -> Any:
        """Open a safetensors file. It is opened again for each read, because an open file keeps all data read from it
        in memory."""
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


class DummyTensors(Tensors):
    """Random weights for any model, to measure speed without a checkpoint. Every start draws the same weights.

    The weights have the dtype in which the model computes. Scales of norms are 1 and biases are 0. All other weights
    are normally distributed with a standard deviation of 0.02, the initialization of GPT-2 (Radford et al., 2019), so
    that activations stay bounded.
    """

    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def check(self, name: str, piece: Piece) -> None:
        """Accept every piece, since any weight can be drawn."""

    def copy(self, name: str, piece: Piece) -> None:
        """Fill the piece's target in place with random values."""
        target = piece.target
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        device = target.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        target.normal_(0.0, 0.02, generator=self._generators[device])
