"""How much the rounding errors of a model's weights count, measured with a text: the importance of each input.

An output changes by the error of a weight times the input. So the errors of a column count as the mean square of its
input, as in llama.cpp's importance matrices (https://github.com/ggml-org/llama.cpp/tree/master/tools/imatrix).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.operations import OperationList, Projection, weights_of
from worker_service.models.decoder import Decoder
from worker_service.models.linear import ExpertLinear, Linear

_FORMAT, _FORM = "pagewire importance 1", "format"
_MODEL = "model"
_LEAST = 2.0**-20  # of the mean importance, so that no group of inputs is without any


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """The mean squares of the inputs of a model's linear weights over a text.

    Attributes:
        model_digest: the digest of the model's configuration and tokenizer, see `pagewire.network.source.model_digest`.
        mean_squares: [in_size] float32, by the name of the weight. Weights that had no input are missing, for example
            those of experts that no token chose.
    """

    model_digest: bytes
    mean_squares: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write the importance to a safetensors file. Raises OSError if that fails."""
        metadata, partial = {_FORM: _FORMAT, _MODEL: self.model_digest.hex()}, path.with_name(f"{path.name}.part")
        try:
            save_file(dict(self.mean_squares), partial, metadata)
            partial.replace(path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` has written. Raises ValueError if the file is missing, or is another file."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            if metadata.get(_FORM) != _FORMAT or not re.fullmatch("([0-9a-f]{2})*", metadata.get(_MODEL, "")):
                raise ValueError(f"{path} was not written by this version of pagewire calibrate")
            return cls(bytes.fromhex(metadata.get(_MODEL, "")), load_file(path))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def digest(self) -> str:
        """Return a digest of the values, in hexadecimal."""
        found = hashlib.sha256()
        for name, values in sorted(self.mean_squares.items()):
            found.update(f"{name}\0{values.dtype}\0".encode() + values.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def by_weight(self, listed: OperationList) -> dict[str, Tensor]:
        """Return the importance of each column, with a mean of 1, by the name of the weight. Raises CheckpointError if
        it does not fit the weights of a model's operations."""
        sizes = {
            f"{module}.weight": weight.in_size
            for weight in weights_of(listed)
            if type(weight) is Projection
            for module in weight.modules
        }
        for name, values in self.mean_squares.items():
            is_usable = values.dtype == torch.float32 and values.isfinite().all() and (values >= 0).all()
            if not is_usable or values.shape != (sizes.get(name, -1),):
                raise CheckpointError(f"the importance of {name} does not fit the model: calibrate it again")
        means = {name: values.mean() for name, values in self.mean_squares.items()}
        return {name: (self.mean_squares[name] / mean).clamp_(min=_LEAST) for name, mean in means.items() if mean > 0}


@dataclass(slots=True, eq=False)
class InputSquares:
    """Sums of the squares of a model's inputs to its linear weights. They grow with each forward pass of the model."""

    _sums: dict[str, Tensor] = field(default_factory=dict)  # [num_experts or 1, in_size] float64, by holder
    _counts: dict[str, Tensor] = field(default_factory=dict)  # [num_experts or 1] tokens, by holder
    _modules: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)  # the weights of each row, by holder

    @classmethod
    def of(cls, model: Decoder) -> Self:
        """Observe the linear weights of a loaded model. The LM head and routers never have 4 bits."""
        squares = cls()
        for weight, holder in model.holders.items():
            if type(weight) is Projection and not weight.is_float32 and holder is not model.head:
                squares._observe(weight, holder)
        return squares

    def _observe(self, weight: Projection, holder: Linear | ExpertLinear) -> None:
        experts = map(weight.of_expert, range(weight.num_experts)) if weight.num_experts else [weight]
        rows = [each.modules for each in experts]
        sums = torch.zeros(len(rows), weight.in_size, dtype=torch.float64)
        counts = torch.zeros(len(rows), dtype=torch.int64)
        self._sums[weight.name], self._counts[weight.name], self._modules[weight.name] = sums, counts, rows

        def add(holder: object, inputs: tuple[Any, ...]) -> None:
            x, *ids = inputs
            squares = x.double().square()
            if not ids:
                sums[0] += squares.sum(0)
                counts[0] += len(x)
                return
            chosen = ids[0].flatten().long()
            slots = squares if len(x) == len(chosen) else squares.repeat_interleave(ids[0].shape[1], 0)
            sums.index_add_(0, chosen, slots)
            counts.add_(torch.bincount(chosen, minlength=len(counts)))

        holder.register_forward_pre_hook(add)

    def mean(self) -> dict[str, Tensor]:
        """Return the mean square of each input, [in_size] float32, by the name of the weight."""
        return {
            f"{module}.weight": (sums[row] / count).float()
            for name, sums in self._sums.items()
            for row, count in enumerate(self._counts[name].tolist())
            for module in self._modules[name][row]
            if count
        }
