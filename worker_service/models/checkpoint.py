"""Checkpoint directories as Hugging Face publishes them: config.json and safetensors. Nothing is ever unpickled."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_service.models.checkpoint_files import CONFIG_FILE, FLOAT_BYTES, CheckpointError, read_headers

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part to read of a checkpoint's tensor of shape `shape`, and the tensor that it goes to. Without an index it
    is all of a tensor that is shaped as the target."""

    target: Tensor
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = ()

    def transposed(self) -> "Piece":
        """Return the piece for a checkpoint that holds this matrix transposed."""
        index = self.index and (*self.index, slice(None))[1::-1]
        return replace(self, target=self.target.t(), shape=self.shape[::-1], index=index)


class Tensors(Protocol):
    """A source of a model's weights, by name."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors that are known beforehand."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor that is among `names`, or None if it is none that a model computes in."""

    def check(self, name: str, piece: Piece) -> None:
        """Raises CheckpointError if there is no tensor that fits. The piece's target need hold no memory."""

    def copy(self, name: str, piece: Piece) -> None:
        """Fills the target of a piece that has been checked."""


class Checkpoint:
    """The tensors of a checkpoint directory by name. Opening it reads headers only; a tensor is read when asked for."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: no safetensors files, an index naming a missing file, or a file that is not safetensors.
        """
        self._path = path
        self._headers = read_headers(path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._headers)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `Tensors.dtype`."""
        return _DTYPES.get(self._headers[name].dtype)

    def check(self, name: str, piece: Piece) -> None:
        """See `Tensors.check`."""
        expected = list(piece.shape or piece.target.shape)
        if name not in self._headers:
            raise CheckpointError(f"tensor {name} is missing in {self._path}; expected shape {expected}")
        header = self._headers[name]
        if list(header.shape) != expected:
            shapes = f"shape {list(header.shape)}, expected {expected}"
            raise CheckpointError(f"tensor {name} in {header.file} has {shapes} from {CONFIG_FILE}")
        if header.dtype not in FLOAT_BYTES:
            raise CheckpointError(
                f"tensor {name} in {header.file} is {header.dtype}; quantized checkpoints are not supported"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Reads a tensor, or no more than a part of it, straight into the piece's target, to its dtype and device.

        The piece has been checked. Raises CheckpointError if the file cannot be read.
        """
        try:
            file = self._open(self._path / self._headers[name].file)
            tensor = file.get_slice(name)[piece.index] if piece.index else file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {self._headers[name].file}: {error}") from error
        piece.target.copy_(tensor)

    @staticmethod
    def _open(file: Path) -> Any:
        """Opened anew each time: a file that stays open keeps in memory all that was read of it."""
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


class DummyTensors:
    """Random weights for any model, to measure speed without a checkpoint: the same ones on every start.

    Norms scale by 1, biases are 0, and all else is normal with a deviation of 0.02, as untrained models begin (Radford
    et al., 2019, GPT-2), so that no activation grows out of bounds.
    """

    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def dtype(self, name: str) -> torch.dtype | None:
        """There is none: weights are of whatever dtype the model computes in."""
        return None

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
