"""Loads a checkpoint directory or a GGUF file into a model, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pagewire.gguf import is_gguf
from pagewire.kernels.float8 import Float8Format
from pagewire.kernels.quantized import QuantizedFormat
from worker_service.models import decoder, gpt2
from worker_service.models.checkpoint import Checkpoint, DummyTensors, Tensors
from worker_service.models.communicator import Communicator, SingleRank
from worker_service.models.config import GPT2, ModelConfig
from worker_service.models.gguf.checkpoint import GgufCheckpoint
from worker_service.models.linear import Embedding, Linear
from worker_service.models.model import Model
from worker_service.models.operations import Operations, TorchOperations
from worker_service.models.quantization import Quantization, WeightFormat
from worker_service.models.quantized_checkpoint import QuantizedCheckpoint
from worker_service.models.rope import RotaryEmbedding
from worker_service.models.shard import Shard, Split
from worker_service.models.source import load_config
from worker_service.models.weights import (
    Progress,
    Weight,
    check_weights,
    fill_layers,
    hold_dtypes,
    keep_quantized,
    load_weights,
    working_bytes,
)


@dataclass(frozen=True, slots=True)
class _Code:
    """The class of an architecture's model, and the names that its checkpoints give to its weights."""

    model: type[decoder.Decoder] | type[gpt2.GPT2]
    weights: tuple[Weight, ...]
    ignored: str  # pattern of checkpoint names that hold no weights
    optional_prefix: str = ""  # of checkpoint names; some published files lack it


# What a quantised element takes beside its panels while they are packed: its code, that of its projection, and scales.
_JOINING_BYTES = 4

_DECODER = _Code(decoder.Decoder, decoder.WEIGHTS, decoder.IGNORED)
_GPT2 = _Code(gpt2.GPT2, gpt2.WEIGHTS, gpt2.IGNORED, optional_prefix="transformer.")


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    operations: Operations | None = None,
    is_dummy: bool = False,
    communicator: Communicator | None = None,
) -> Model:
    """Loads a model, or one rank's part of it, ready to run.

    Args:
        path: a directory that holds config.json and the safetensors files, or a GGUF file.
        dtype: what the model computes in. Weights are converted as they are read, except where `operations` multiply
            with them in the dtype of the checkpoint.
        device: where it computes.
        progress: called after each tensor with (tensors loaded, tensors in all).
        operations: what the model computes with; by default plain torch.
        is_dummy: the directory need hold nothing but config.json, and the weights are random.
        communicator: the rank whose part it is, of how many, and how they meet; by default there is one.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ValueError: the model cannot be shared out among so many ranks.
    """
    unloaded = prepare_model(
        path, dtype=dtype, device=device, operations=operations, is_dummy=is_dummy, communicator=communicator
    )
    return unloaded.load(progress)


def prepare_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations | None = None,
    is_dummy: bool = False,
    communicator: Communicator | None = None,
) -> "UnloadedModel":
    """Return the model that `load_model` would load, compared with the headers of the files. Its arguments and errors
    are those of `load_model`."""
    communicator = communicator or SingleRank()
    shard = Shard.of(load_config(path), communicator.rank, communicator.size)
    checkpoint = DummyTensors() if is_dummy else _open(path)
    code = _GPT2 if shard.config.architecture == GPT2 else _DECODER
    operations = operations or TorchOperations()
    with torch.device("meta"):
        model = code.model(shard.config, operations, communicator)
    table = tuple(_weights(code, shard.config, checkpoint))
    if isinstance(checkpoint, Checkpoint) and shard.config.quantization is not None:
        checkpoint = QuantizedCheckpoint(checkpoint, _formats(model, table, shard.config.quantization))
    # As in transformers, a head that the checkpoint holds counts, whatever config.json says.
    has_head = not checkpoint.names.isdisjoint(checkpoint.stored_names("lm_head.weight"))
    is_tied = shard.config.tie_word_embeddings and not has_head
    stays_quantized = shard.size == 1 and operations.multiplies_quantized(dtype)
    if is_tied and stays_quantized and _quantized_embedding(model, checkpoint, table) is not None:
        # The head has the codes, and the embedding takes rows of it.
        others = (weight for weight in table if weight.target != "head")
        table = tuple(replace(weight, target="head") if weight.target == "embedding" else weight for weight in others)
        model.embedding.weight = None
    elif is_tied:
        model.head.weight = None
    model.to(dtype)
    hold_dtypes(model, checkpoint, table, lambda held: operations.can_hold(held, dtype))
    if stays_quantized:
        keep_quantized(model, checkpoint, table)
    check_weights(model, checkpoint, table, code.ignored, shard)
    return UnloadedModel(model, checkpoint, table, shard, dtype, device, operations, is_tied)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory that a model takes where it computes."""

    held: int  # once it is loaded
    peak: int  # the most at any time until then


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model whose weights take no memory yet, and where they are to come from."""

    model: decoder.Decoder | gpt2.GPT2
    checkpoint: Tensors
    table: tuple[Weight, ...]
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    operations: Operations
    is_tied: bool

    def footprint(self) -> Footprint:
        """Return how much memory the model takes. Packing a weight for its product copies it, and the weight is let go
        before the next one is packed. A weight that is quantised is decoded on the way."""
        modules = list(self.model.modules())
        tensors = [*self._parameters(), *self.model.buffers()]
        weights = sum(tensor.nbytes for tensor in tensors)
        products = [
            module.weight.nbytes
            for module in modules
            if isinstance(module, Linear) and module.weight is not None and module.quantized_format is None
        ]
        quantized = [(module.quantized_format, _shape(module)) for module in self._quantized()]
        weights += sum(stored.num_bytes(*shape) for stored, shape in quantized if stored is not None)
        packs = self.operations.packs(self.dtype, self.device)
        tied_bytes = self._tied_bytes() if self.is_tied else 0
        if self.shard.size > 1:  # a part of the embedding, which is packed as any other weight
            weights += tied_bytes
            products.append(tied_bytes)
            tied_bytes = 0
        held = weights + (tied_bytes if packs and not self.operations.takes_rows(self.dtype) else 0)
        copies = [*products, tied_bytes] if packs else []
        copies += [_JOINING_BYTES * out_size * in_size for _, (out_size, in_size) in quantized]
        copies += [working_bytes(self.model, self.checkpoint, self.table, self.shard)]
        tables = [module.working_bytes() for module in modules if isinstance(module, RotaryEmbedding)]
        return Footprint(
            held, peak=max(held, weights + max([0, *copies, *(tables if self.device.type == "cpu" else [])]))
        )

    def _quantized(self) -> list[Linear]:
        """The products whose weights stay quantised."""
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        return [module for module in linears if module.quantized_format is not None]

    def _parameters(self) -> list[Tensor]:
        """The parameters without the weights that stay quantised."""
        left_out = {id(module.weight) for module in self._quantized()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in left_out]

    def describe_quantization(self) -> str | None:
        """Say in a line what becomes of quantised weights; None: there are none."""
        if not self.checkpoint.formats:
            return None
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"weights are stored in {', '.join(self.checkpoint.formats)}: {len(self._quantized())} of {len(linears)} "
            f"products read them as they are, whatever else is quantised is widened to {dtype}"
        )

    def _tied_bytes(self) -> int:
        """Return the bytes that the head would take if it were not the embedding; 0 where the embedding is the head."""
        weight = self.model.embedding.weight
        if weight is None:
            return 0
        return sum(self.model.head.out_sizes) * weight.shape[1] * weight.dtype.itemsize

    def load(self, progress: Progress | None = None) -> Model:
        """`progress` is called after each tensor with (tensors loaded, tensors in all)."""
        model, shard, device = self.model, self.shard, self.device
        # Not `to_empty`: torch lays out meta tensors with symbolic shapes, and importing their sympy takes half a
        # second.
        allocated = {id(tensor) for tensor in [*self._parameters(), *model.buffers()]}
        model._apply(
            lambda tensor: (
                torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if id(tensor) in allocated else tensor
            )
        )
        load_weights(model, self.checkpoint, self.table, progress, shard, self.dtype)
        if self.is_tied and model.embedding.weight is not None:
            model.head.weight = _tied_head(model, shard)
        _finish(model, self.dtype, self.is_tied and shard.size == 1)
        return model.requires_grad_(False).eval()


def _open(path: Path) -> Tensors:
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path)


def _tied_head(model: decoder.Decoder | gpt2.GPT2, shard: Shard) -> nn.Parameter:
    """The embedding's weight; among several ranks, which hold the embedding whole, the rows of this one."""
    whole = model.embedding.weight
    assert isinstance(whole, nn.Parameter)
    if shard.size == 1:
        return whole
    rows = whole[shard.span(Split.VOCABULARY)]
    head = whole.new_zeros(*model.head.out_sizes, whole.shape[1])
    head[: len(rows)] = rows
    return nn.Parameter(head, requires_grad=False)


def _finish(model: decoder.Decoder | gpt2.GPT2, dtype: torch.dtype, is_tied: bool) -> None:
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Linear):
            module.finish_loading(dtype)
        elif isinstance(module, RotaryEmbedding):
            module.finish_loading()
    for module in modules:
        if isinstance(module, Embedding):
            module.finish_loading(dtype, model.head if is_tied and module is model.embedding else None)


def _quantized_embedding(
    model: decoder.Decoder | gpt2.GPT2, checkpoint: Tensors, table: tuple[Weight, ...]
) -> QuantizedFormat | Float8Format | None:
    (source,) = [weight.source for weight in table if weight.target == "embedding"]
    return checkpoint.quantized_format(f"{source}.weight", model.config.hidden_size)


def _shape(module: Linear) -> tuple[int, int]:
    assert module.weight is not None
    return sum(module.out_sizes), module.weight.shape[1]


def _formats(
    model: decoder.Decoder | gpt2.GPT2, table: tuple[Weight, ...], quantization: Quantization
) -> dict[str, WeightFormat]:
    """The formats of the checkpoint's linear modules that are quantised, by their names there."""
    modules = [weight.source for weight in table if isinstance(model.get_submodule(weight.target), Linear)]
    formats = {module: quantization.format_of(module) for module in modules}
    return {module: weight_format for module, weight_format in formats.items() if weight_format is not None}


def _weights(code: _Code, config: ModelConfig, checkpoint: Tensors) -> Iterator[Weight]:
    """The architecture's table for this model, in the names this checkpoint uses."""
    prefix = code.optional_prefix
    has_prefix = any(name.startswith(prefix) for name in checkpoint.names)
    for weight in fill_layers(code.weights, config.num_layers):
        yield weight if has_prefix else replace(weight, source=weight.source.removeprefix(prefix))
