"""Checkpoint directories as Hugging Face publishes them: config.json and safetensors. Nothing is ever unpickled."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.kernels.weight import HeldFormat, HeldWeight
from pagewire.network.checkpoint_files import (
    CONFIG_FILE,
    FLOAT_BYTES,
    CheckpointError,
    TensorHeader,
    read_headers,
)
from pagewire.network.stacks import StackedPart, Stacks, find_part, unstacked_names

FLOATS = {"F32": HeldFormat(torch.float32), "F16": HeldFormat(torch.float16), "BF16": HeldFormat(torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part to read of a checkpoint's tensor of shape `shape`, and the tensor that it goes to. Without an index it
    is all of a tensor that is shaped as the target."""

    target: Tensor
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = ()

    def rows_and_columns(self) -> tuple[slice, ...]:
        """Return what to read of a matrix: both."""
        return (*self.index, slice(None), slice(None))[:2]

    def transposed(self) -> "Piece":
        """Return the piece for a checkpoint that holds this matrix transposed."""
        index = self.index and (*self.index, slice(None))[1::-1]
        return replace(self, target=self.target.t(), shape=self.shape[::-1], index=index)


class Tensors(ABC):
    """A source of a model's weights, by name. A weight of the model may be made of several tensors; it is of floats, in
    one tensor, and read into its place where a source does not say otherwise."""

    names: frozenset[str]  # of the tensors known beforehand, each of which must have a place in the model
    formats: tuple[str, ...] = ()  # what quantised weights are stored in, for people; empty: there are none

    def stored_names(self, name: str) -> frozenset[str]:
        """Return the names of the tensors that a weight is made of, whether they are there or not."""
        return frozenset((name,))

    def format(self, name: str, in_size: int) -> HeldFormat | None:
        """Return what so many inputs of a weight can be held in; None: it is not there, or in nothing that could be, as
        groups that would be cut."""
        return None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return how much memory beside the target reading a weight of this many elements takes at most."""
        return 0

    @abstractmethod
    def check(self, name: str, piece: Piece) -> None:
        """Raises CheckpointError if there is no weight that fits, and ValueError if it cannot be cut like this. The
        piece's target need hold no memory."""

    @abstractmethod
    def copy(self, name: str, piece: Piece) -> None:
        """Fills the target of a piece that has been checked. Raises CheckpointError if a file cannot be read."""

    def quantized(self, name: str, piece: Piece) -> HeldWeight:
        """Return what a piece that has been checked has of a weight with scales; its target is left alone. It is
        in float32 where, against its format, groups of codes cannot say the same."""
        raise AssertionError(f"{name} is not quantised")


class Checkpoint(Tensors):
    """The tensors of a checkpoint directory by name. Opening it reads headers only; a tensor is read when asked for."""

    def __init__(self, path: Path, stacks: Stacks | None = None) -> None:
        """
        Args:
            stacks: of tensors that may be there of all experts, each of which has names of its own here.

        Raises:
            CheckpointError: no safetensors files, an index naming a missing file, or a file that is not safetensors.
        """
        self.path = path
        self._headers = read_headers(path)
        unstacked = {
            name: frozenset(unstacked_names(stacks or {}, name, header)) for name, header in self._headers.items()
        }
        # A stack of what is also there by itself has no place in a model.
        own_names = [frozenset((name,)) if names & self._headers.keys() else names for name, names in unstacked.items()]
        self.names = frozenset().union(*own_names)
        self._stacks = {} if self.names == self._headers.keys() else stacks or {}

    def header(self, name: str) -> TensorHeader:
        """Return the header of a tensor that is there."""
        part = self._part(name)
        return self._headers[name] if part is None else part.header(self._headers[part.stack])

    def described(self, name: str) -> str:
        """Return the name of a tensor, there or not, as it stands in the files."""
        part = self._part(name)
        return name if part is None else part.describe()

    def _part(self, name: str) -> StackedPart | None:
        return None if name in self._headers else find_part(self._stacks, name)

    def format(self, name: str, in_size: int) -> HeldFormat | None:
        """See `Tensors.format`."""
        return FLOATS.get(self.header(name).dtype) if name in self.names else None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """See `Tensors.working_bytes`: files are read straight into targets, but for projections that take turns."""
        part = self._part(name)
        return 0 if part is None else part.num_turns * num_elements * torch.float32.itemsize

    def check(self, name: str, piece: Piece) -> None:
        """See `Tensors.check`."""
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
                f"tensor {described} in {header.file} is {header.dtype}, which are no floats; {CONFIG_FILE} has no "
                "quantization_config that says what they mean"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Reads a tensor, or no more than a part of it, straight into the piece's target, to its dtype and device.

        The piece has been checked. Raises CheckpointError if the file cannot be read.
        """
        piece.target.copy_(self.read(name, piece.index))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor that is there, or a part of it. Raises CheckpointError if the file cannot be read."""
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
        """Opened anew each time: a file that stays open keeps in memory all that was read of it."""
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


class DummyTensors(Tensors):
    """Random weights for any model, to measure speed without a checkpoint: the same ones on every start.

    They are of whatever dtype the model computes in. Norms scale by 1, biases are 0, and all else is normal with a
    deviation of 0.02, as untrained models begin (Radford et al., 2019, GPT-2), so that no activation grows out of
    bounds.
    """

    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def check(self, name: str, piece: Piece) -> None:
        """Whatever is asked for can be drawn."""

    def copy(self, name: str, piece: Piece) -> None:
        """Draws the piece's target where it is."""
        target = piece.target
        if target.dim() == 1:
            target.fill_(1.0 if name.endswith(".weight") else 0.0)
            return
        device = target.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        target.normal_(0.0, 0.02, generator=self._generators[device])
