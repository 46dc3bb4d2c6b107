"""Checkpoint directories as Hugging Face publishes them: config.json and safetensors. Nothing is ever unpickled."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read of a tensor of this shape, and where it goes; without an index all of one shaped as the target."""

    target: Tensor
    shape: tuple[int, ...] = ()
    index: tuple[slice, ...] = ()

    def transposed(self) -> "Piece":
        """Of a matrix that the checkpoint holds the other way round."""
        index = self.index and (*self.index, slice(None))[1::-1]
        return replace(self, target=self.target.t(), shape=self.shape[::-1], index=index)


class Tensors(Protocol):
    """Where a model's weights come from."""

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that are known beforehand."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a tensor that is among `names`; None if it is none that a model computes in."""

    def copy(self, name: str, piece: Piece) -> None:
        """Fills the piece's target. Raises CheckpointError if there is no tensor that fits."""


class CheckpointError(Exception):
    """A checkpoint that cannot be served. The text names the file or tensor at fault and what was expected."""


class Checkpoint:
    """The tensors of a checkpoint directory by name. Opening it reads headers only; a tensor is read when asked for."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: no safetensors files, an index naming a missing file, or a file that is not safetensors.
        """
        self._path = path
        self._files = self._find_files()  # tensor name -> file name

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `Tensors.dtype`."""
        return _DTYPES.get(self._open(self._files[name]).get_slice(name).get_dtype())

    def copy(self, name: str, piece: Piece) -> None:
        """Reads a tensor, or no more than a part of it, straight into the piece's target, to its dtype and device.

        Raises:
            CheckpointError: there is no such tensor, its shape is not as expected, or it is not floating point.
        """
        expected = list(piece.shape or piece.target.shape)
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is missing in {self._path}; expected shape {expected}")
        try:
            file = self._open(self._files[name])
            shape = file.get_slice(name).get_shape()
            if shape != expected:
                shapes = f"shape {shape}, expected {expected}"
                raise CheckpointError(f"tensor {name} in {self._files[name]} has {shapes} from {CONFIG_FILE}")
            tensor = file.get_slice(name)[piece.index] if piece.index else file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read from {self._files[name]}: {error}") from error
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise CheckpointError(f"tensor {name} is {tensor.dtype}; quantized checkpoints are not supported")
        piece.target.copy_(tensor)

    def _find_files(self) -> dict[str, str]:
        if (self._path / INDEX_FILE).is_file():
            weight_map = read_json(self._path / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{self._path / INDEX_FILE} has no weight_map")
            for file_name in dict.fromkeys(weight_map.values()):
                if not isinstance(file_name, str) or Path(file_name).name != file_name:
                    raise CheckpointError(f"{self._path / INDEX_FILE} names {file_name!r}, which is no file beside it")
                self._open(file_name)
            return weight_map
        if not (self._path / SINGLE_FILE).is_file():
            raise CheckpointError(
                f"{self._path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert it to safetensors"
            )
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def _open(self, file_name: str) -> Any:
        """Opened anew each time: a file that stays open keeps in memory all that was read of it."""
        file = self._path / file_name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {INDEX_FILE} names it")
        try:
            return safe_open(file, framework="pt", device="cpu")
        except SafetensorError as error:
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; a checkpoint directory must have it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def model_digest(path: Path) -> bytes:
    """SHA-256 over the bytes of config.json and, where there is one, tokenizer.json after it: 32 bytes.

    The scheduler computes the same from its own copy: equal digests mean that both sides speak of the same model.
    """
    config = path / CONFIG_FILE
    if not config.is_file():
        raise CheckpointError(f"{config} is missing; a checkpoint directory must have it")
    tokenizer = path / TOKENIZER_FILE
    digest = hashlib.sha256(config.read_bytes())
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.digest()
