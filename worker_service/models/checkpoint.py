"""Checkpoint directories as Hugging Face publishes them: config.json and safetensors files. Pickle files are never
loaded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
from pagewire.network.stacks import StackedPart, Stacks, find_part, unstacked_names, with_layout

RowsT = TypeVar("RowsT", Tensor, StoredWeight)
FLOATS = {"F32": StoredFormat(torch.float32), "F16": StoredFormat(torch.float16), "BF16": StoredFormat(torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A request to read a tensor of a checkpoint, or a part of it, into memory. `target` is the tensor to fill, `shape`
    is the full shape of the checkpoint's tensor, and `index` selects the part to read. If `index` is empty, the whole
    tensor is read, and it must have the shape of the target. `rows` selects rows of the part; None selects all."""

    target: Tensor
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = ()
    rows: Tensor | None = None  # int64

    def choose_rows(self, part: RowsT) -> RowsT:
        """Return the rows to keep of the part of the tensor that `index` selects."""
        return part if self.rows is None else part[self.rows]

    def rows_and_columns(self) -> tuple[slice, ...]:
        """Return the slice of rows and the slice of columns that this piece reads from a matrix in the checkpoint."""
        return (*self.index, slice(None), slice(None))[:2]

    def transposed(self) -> "Piece":
        """Return a piece that reads the same part of the matrix from a checkpoint that stores the matrix transposed, as
        [inputs, outputs]."""
        index = self.index and (*self.index, slice(None))[1::-1]
        return replace(self, target=self.target.t(), shape=self.shape[::-1], index=index)


class Tensors(ABC):
    """A source from which a model's weights are read by name, for example a checkpoint directory or a GGUF file. A
    quantised weight may be stored as several tensors. The default implementation is for weights that are one tensor of
    floats each; they are read directly into their targets."""

    names: frozenset[str]  # tensors known in advance
    # Each tensor must have a place in the model. Otherwise further layers and parts outside the model may be left out.
    is_exact: bool = False
    # Names of the formats of quantised weights, for log lines; empty: no weight is quantised.
    formats: tuple[str, ...] = ()

    def stored_names(self, name: str) -> frozenset[str]:
        """Return the names of the checkpoint tensors that store the weight `name`. The tensors need not exist."""
        return frozenset((name,))

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format of a weight with `in_size` inputs, if the weight can be kept in memory in the format in
        which it is stored. Return None if the weight is missing or must be converted. For example, it must be converted
        if `in_size` is not a multiple of the number of inputs that share a scale."""
        return None

    def num_bytes(self) -> int:
        """Return the size of the weights in the checkpoint's files, in bytes, or 0 if it is not known."""
        return 0

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to read a weight with `num_elements`
        elements. The memory of the target tensor is not included."""
        return 0

    @abstractmethod
    def check(self, name: str, piece: Piece) -> None:
        """Check, before any weight is loaded, that the weight `name` exists and can fill the target of `piece`. Raise
        CheckpointError if the weight is missing or has another shape or dtype. Raise ValueError if the weight cannot be
        divided at the bounds of the piece. The target may be a meta tensor, which has no memory."""

    @abstractmethod
    def copy(self, name: str, piece: Piece) -> None:
        """Read a weight, or the part that `piece` selects, into the target of `piece`, and convert it to the target's
        dtype. The piece must have passed `check`. Raises CheckpointError if a file cannot be read."""

    def quantized(self, name: str, piece: Piece) -> StoredWeight:
        """Read a weight, or the part that `piece` selects, and return it in quantised form. The target of the piece is
        not written. The piece must have passed `check`. If the weight cannot be represented by codes with one scale per
        group, the result is in float32, although `format` reported a quantised format."""
        raise AssertionError(f"{name} is not quantised")


class Checkpoint(Tensors):
    """The weights of a checkpoint directory with safetensors files, requested by name. The constructor reads only the
    headers of the files. Each tensor is read on request."""

    def __init__(self, path: Path, stacks: Stacks | None = None) -> None:
        """Read the headers of all safetensors files in the directory `path`.

        Some checkpoints store the weights of all experts of a layer in one tensor. `stacks` describes these tensors, so
        that each expert's weight can be read under a name of its own. Raises CheckpointError if there are no
        safetensors files, if the index names a missing file, or if a file is not in the safetensors format.
        """
        self.path = path
        self._headers = read_headers(path)
        stacks = with_layout(stacks or {}, self._headers)
        unstacked = {name: frozenset(unstacked_names(stacks, name, header)) for name, header in self._headers.items()}
        # If an expert's tensor is also stored by itself, the stack that contains it has no place in the model.
        own_names = [frozenset((name,)) if names & self._headers.keys() else names for name, names in unstacked.items()]
        self.names = frozenset().union(*own_names)
        self._stacks = {} if self.names == self._headers.keys() else stacks

    def num_bytes(self) -> int:
        """Return the size of all safetensors files that contain weights, in bytes."""
        return sum((self.path / file).stat().st_size for file in {header.file for header in self._headers.values()})

    def header(self, name: str) -> TensorHeader:
        """Return the header of an existing tensor."""
        part = self._part(name)
        return self._headers[name] if part is None else part.header(self._headers[part.stack])

    def described(self, name: str) -> str:
        """Return the name to use for the weight `name` in error messages: the name of the tensor in the files that
        contains it. The tensor need not exist."""
        part = self._part(name)
        return name if part is None else part.describe()

    def _part(self, name: str) -> StackedPart | None:
        return None if name in self._headers else find_part(self._stacks, name)

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the float format in which the checkpoint stores a weight, so that the weight can be loaded without
        conversion. Return None if the weight is missing or is not stored as floats."""
        return FLOATS.get(self.header(name).dtype) if name in self.names else None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to read a weight with `num_elements`
        elements. It is 0 for most weights, which are read directly into their targets. Weights of stacked experts with
        interleaved projections need memory for a float32 copy."""
        part = self._part(name)
        return 0 if part is None else part.num_turns * num_elements * torch.float32.itemsize

    def check(self, name: str, piece: Piece) -> None:
        """Raise CheckpointError unless the checkpoint has a float tensor with this name and with the shape that `piece`
        expects. A single value may have no dimension. A convolution's weight is [channels, 1, kernel size]."""
        expected = list(piece.shape or piece.target.shape)
        described = self.described(name)
        if name not in self.names:
            raise CheckpointError(f"tensor {described} is missing in {self.path}; expected shape {expected}")
        header = self.header(name)
        allowed = [tuple(expected), (expected[0], 1, *expected[1:])] + [()] * (expected == [1])
        if header.shape not in allowed:
            shapes = f"shape {list(header.shape)}, expected {expected}"
            raise CheckpointError(f"tensor {described} in {header.file} has {shapes} from {CONFIG_FILE}")
        if header.dtype not in FLOAT_BYTES:
            raise CheckpointError(
                f"tensor {described} in {header.file} is {header.dtype}, which is not a float type; {CONFIG_FILE} "
                "has no quantization_config that describes it"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Read a tensor, or the part that the piece selects, into the piece's target, and convert it to the target's
        dtype and device.

        The piece must have passed `check`. Raises CheckpointError if the file cannot be read.
        """
        piece.target.copy_(piece.choose_rows(self.read(name, piece.index)).view_as(piece.target))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read an existing tensor from its safetensors file, or only the part that `index` selects, and return it on
        the CPU. Raises CheckpointError if the file cannot be read."""
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
        """Open a safetensors file. The file is opened again for each read, because an open file keeps all data read
        from it in memory. Raises CheckpointError if the file is missing or incomplete."""
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


class DummyTensors(Tensors):
    """Random weights for any model, to measure speed without a checkpoint. Every start of the worker draws the same
    weights.

    The weights have the dtype in which the model computes. Scales of norms are 1 and biases are 0. All other weights
    are normally distributed with a standard deviation of 0.02, the initialization of GPT-2 (Radford et al., 2019), so
    that activations stay bounded.
    """

    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def check(self, name: str, piece: Piece) -> None:
        """Check nothing: a random weight can have any name and shape."""

    def copy(self, name: str, piece: Piece) -> None:
        """Fill the piece's target in place: with normally distributed values for a matrix, 1 for the scale of a norm,
        and 0 for a bias."""
        target = piece.target
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        device = target.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        target.normal_(0.0, 0.02, generator=self._generators[device])
