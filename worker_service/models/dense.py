"""The dense layers that some embedding checkpoints apply to pooled hidden states, after the Dense modules of
sentence-transformers."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.common.gguf import is_gguf
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.pooling_config import DenseModule, read_pooling
from worker_service.models.checkpoint import Checkpoint, DummyTensors, Piece, Tensors

# The classes that `DENSE_ACTIVATIONS` names.
_ACTIVATIONS = {each.__name__: each() for each in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer and its activation, in float32."""

    weight: Tensor  # [out_size, in_size]
    bias: Tensor | None  # [out_size]
    activation: nn.Module

    def apply(self, vector: Tensor) -> Tensor:
        """Return activation(weight @ vector + bias), [out_size] float32, of a `vector` [in_size]."""
        activated: Tensor = self.activation(F.linear(vector.float(), self.weight, self.bias))
        return activated


def load_dense_layers(path: Path, hidden_size: int, device: torch.device, *, is_dummy: bool) -> tuple[DenseLayer, ...]:
    """Load the dense layers of a checkpoint directory to `device`, in the order in which they are applied to a vector
    of `hidden_size` numbers.

    With `is_dummy`, the weights are random. The result is empty for a GGUF file, and for a checkpoint without such
    layers or with unsupported modules, which makes no embeddings. Raises CheckpointError if a file is missing or does
    not fit the configuration.
    """
    layers, in_size = list[DenseLayer](), hidden_size
    for module in () if is_gguf(path) else read_pooling(path).dense:
        if module.in_size != in_size:
            raise CheckpointError(
                f"{path / module.folder}/config.json: in_features is {module.in_size}, but must be {in_size}, the size "
                "of the vector that the layer receives"
            )
        in_size = module.out_size
        layers.append(_load(DummyTensors() if is_dummy else Checkpoint(path / module.folder), module, device))
    return tuple(layers)


def _load(tensors: Tensors, module: DenseModule, device: torch.device) -> DenseLayer:
    weight, bias = torch.empty(module.out_size, module.in_size, device=device), None
    targets = {"linear.weight": weight}
    if module.has_bias:
        bias = targets["linear.bias"] = torch.empty(module.out_size, device=device)
    for name in sorted(tensors.names - targets.keys()):
        raise CheckpointError(f"{module.folder}: the tensor {name} has no place in a Dense module; remove it")
    for name, target in targets.items():
        tensors.check(name, Piece(target))
        tensors.copy(name, Piece(target))
    return DenseLayer(weight, bias, _ACTIVATIONS[module.activation])
