"""Loads a checkpoint directory or a GGUF file into a model, tensor by tensor."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire.common.gguf import is_gguf
from pagewire.common.network.checkpoint_files import CONFIG_FILE, CheckpointError
from pagewire.common.network.config import ModelConfig
from pagewire.common.network.families import BY_ARCHITECTURE
from pagewire.common.network.families.family import Family, Split, Weight
from pagewire.common.network.shard import Shard
from pagewire.common.network.source import load_config
from pagewire.kernels.quantized import BITS, GROUP_SIZE
from pagewire.kernels.weight import HeldFormat
from worker_service.models.checkpoint import Checkpoint, DummyTensors, Tensors
from worker_service.models.communicator import Communicator, SingleRank
from worker_service.models.decoder import Decoder
from worker_service.models.gguf_checkpoint import GgufCheckpoint
from worker_service.models.linear import Embedding, ExpertLinear, KeptProduct, Linear
from worker_service.models.operations import Operations
from worker_service.models.quantized_checkpoint import QuantizedCheckpoint, formats_of
from worker_service.models.quantizing import QuantizingTensors
from worker_service.models.rope import RotaryEmbedding
from worker_service.models.weights import (
    TensorProgress,
    check_weights,
    fill_layers,
    hold_dtypes,
    keep_quantized,
    load_weights,
    targets_of,
    working_bytes,
)

# Of a quantised element before it is packed: a code, and at most a scale and a minimum for each 16.
_UNPACKED_BYTES = 1.5


def prepare_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations | None = None,
    is_dummy: bool = False,
    communicator: Communicator | None = None,
    quantization: str | None = None,
    max_model_len: int | None = None,
    held_dtype: torch.dtype | None = None,
) -> "UnloadedModel":
    """Return a model, or one rank's part of it, compared with the headers of the files, and ready to be loaded.

    Args:
        path: a directory that holds config.json and the safetensors files, or a GGUF file.
        dtype: what the model computes in. Weights are converted as they are read, except where `operations` multiply
            with them in the dtype of the checkpoint.
        device: where it computes.
        operations: what the model computes with; by default plain torch.
        is_dummy: the directory need hold nothing but config.json, and the weights are random.
        communicator: the rank whose part it is, of how many, and how they meet; by default there is one.
        quantization: "int8" or "int4", for one rank's weights of floats where `operations` multiply with codes.
        max_model_len: the longest sequence that there will be; by default as many positions as the model has.
        held_dtype: what weights of float32 are rounded to, where `operations` multiply with that; by default they stay.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ValueError: the model cannot be shared out among so many ranks.
    """
    communicator = communicator or SingleRank()
    shard = Shard.of(load_config(path).serving(max_model_len), communicator.rank, communicator.size)
    checkpoint = DummyTensors() if is_dummy else _open(path, shard.config)
    family = BY_ARCHITECTURE[shard.config.architecture]
    operations = operations or Operations()
    with torch.device("meta"):
        model = Decoder(shard, operations, communicator)
    table = tuple(_weights(family, model, checkpoint))
    if isinstance(checkpoint, Checkpoint) and shard.config.quantization is not None:
        linears = [weight.source for weight in table if isinstance(model.get_submodule(weight.target), Linear)]
        checkpoint = QuantizedCheckpoint(checkpoint, formats_of(shard.config.quantization, linears))
    if quantization is not None:
        assert (shard.size, checkpoint.formats) == (1, ()), "refused before"
        checkpoint, table = _quantizing(model, checkpoint, table, BITS[quantization], operations)
    is_tied = shard.config.tie_word_embeddings
    if not is_dummy:
        is_tied = _lacks_head(checkpoint, table, path, is_tied=is_tied)
    table = _place_embedding(model, checkpoint, table, shard.size, operations, is_tied=is_tied)
    model.to(dtype)
    _keep_float32(model, device)
    hold_dtypes(model, checkpoint, table, held_dtype, lambda held: operations.can_hold(held, dtype))
    keep_quantized(model, checkpoint, table, operations.holds_quantized)
    targets = [target for weight in table for target in targets_of(model, weight, shard)]
    check_weights(model, checkpoint, targets, _ignored(family, shard.config))
    return UnloadedModel(
        *(model, checkpoint, table, shard, dtype, device, operations),
        is_tied=is_tied and shard.size == 1,
        reading_bytes=working_bytes(checkpoint, targets),
        quantization=quantization,
    )


def _lacks_head(checkpoint: Tensors, table: tuple[Weight, ...], path: Path, *, is_tied: bool) -> bool:
    """Return whether the embedding is the head too. As in transformers, a head that the checkpoint holds counts, though
    config.json says that they are tied. Raises CheckpointError where there is neither."""
    (head,) = [weight.source for weight in table if weight.target == "head"]
    if not checkpoint.names.isdisjoint(checkpoint.stored_names(f"{head}.weight")):
        return False
    if not is_tied:
        raise CheckpointError(
            f"tensor {head}.weight is missing in {path}; if the model's head is its embedding, set tie_word_embeddings "
            f"to true in {CONFIG_FILE}"
        )
    return True


def _place_embedding(
    model: Decoder,
    checkpoint: Tensors,
    table: tuple[Weight, ...],
    num_ranks: int,
    operations: Operations,
    *,
    is_tied: bool,
) -> tuple[Weight, ...]:
    """Return the table in which embedding and head have the weights that each is to hold, and take from the model those
    that neither does."""
    (embedding,) = [weight for weight in table if weight.target == "embedding"]
    embedding_format = checkpoint.quantized_format(f"{embedding.source}.weight", model.config.hidden_size)
    has_codes = embedding_format is not None and operations.holds_quantized(embedding_format)
    if has_codes and num_ranks == 1:
        # The embedding takes rows of the head, which has the codes, or of a layer of its own.
        holder = "head" if is_tied else model.embedding.hold_rows(operations)
        others = (weight for weight in table if not is_tied or weight.target != "head")
        table = tuple(replace(weight, target=holder) if weight.target == "embedding" else weight for weight in others)
        model.embedding.weight = None
    elif is_tied and num_ranks > 1:
        # Each rank's head has the rows of its tokens, and their codes if there are any; the embedding is whole.
        others = (weight for weight in table if weight.target != "head")
        table = (*others, replace(embedding, target="head", split=Split.VOCABULARY))
    elif is_tied:
        model.head.weight = None
    return table


def _quantizing(
    model: Decoder, checkpoint: Tensors, table: tuple[Weight, ...], bits: int, operations: Operations
) -> tuple[QuantizingTensors, tuple[Weight, ...]]:
    """Return the checkpoint whose weights are codes, and the table of what it has: the head and the embedding are of 8
    bits, and no matrix is transposed."""
    names = {weight: f"{weight.source}.weight" for weight in table}
    modules = {weight: model.get_submodule(weight.target) for weight in table}
    found = [weight for weight, module in modules.items() if isinstance(module, Linear) and not module.is_float32]
    by_name = {names[weight]: 8 if weight.target == "head" else bits for weight in found}
    by_name |= {name: 8 for weight, name in names.items() if weight.target == "embedding"}
    transposed = frozenset(names[weight] for weight in found if weight.is_transposed)
    tensors = QuantizingTensors(checkpoint, operations.quantize, by_name, transposed, model.config.head_dim)
    return tensors, tuple(replace(weight, is_transposed=False) for weight in table)


def _keep_float32(model: Decoder, device: torch.device) -> None:
    """Leaves in float32 what is computed in it: routers, sinks, and weights of norms to which one is added. On a CPU
    cosines and sines stay so too, which a fused decoder reads: it would make tables of its own of others."""
    model.keep_float32()
    for rope in model.ropes if device.type == "cpu" else ():
        if isinstance(rope, RotaryEmbedding):
            rope.keep_float32()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory that a model takes where it computes."""

    held: int  # once it is loaded
    peak: int  # the most at any time until then


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model whose weights take no memory yet, and where they are to come from."""

    model: Decoder
    checkpoint: Tensors
    table: tuple[Weight, ...]
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    operations: Operations
    is_tied: bool  # the embedding is the head
    reading_bytes: int  # that reading a weight takes at most beside the model
    quantization: str | None = None  # what its weights become while they load

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
        # The weights of a layer's experts lie in one memory, which is let go with the last of them.
        products += [module.num_bytes() for module in modules if isinstance(module, ExpertLinear)]
        weights += sum(self.operations.quantized_bytes(stored, *module.shape) for module, stored in self._quantized())
        packs = self.operations.packs(self.dtype, self.device)
        embedding = self.model.embedding.weight
        tied_bytes = embedding.nbytes if self.is_tied and embedding is not None else 0
        held = weights + (tied_bytes if packs and not self.operations.takes_rows() else 0)
        copies = [*products, tied_bytes] if packs else []
        copies += [self._unpacked_bytes(module) for module, _ in self._quantized()]
        if self.device.type != "cpu":  # where experts are joined in one memory
            copies += [self._joined_bytes(module) for module in modules if isinstance(module, ExpertLinear)]
        copies += [self.reading_bytes]
        tables = [module.working_bytes() for module in modules if isinstance(module, RotaryEmbedding)]
        return Footprint(
            held, peak=max(held, weights + max([0, *copies, *(tables if self.device.type == "cpu" else [])]))
        )

    def _quantized(self) -> list[tuple[Linear, HeldFormat]]:
        """The products whose weights stay quantised."""
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        return [(module, module.quantized_format) for module in linears if module.quantized_format is not None]

    def _unpacked_bytes(self, module: Linear) -> int:
        """Return what codes and scales take beside the panels while these are packed: twice, where parts are joined."""
        is_whole = self.quantization is not None and len(module.out_sizes) == 1
        return int((1 if is_whole else 2) * _UNPACKED_BYTES * math.prod(module.shape))

    def _joined_bytes(self, experts: ExpertLinear) -> int:
        """Return what the quantised weights of a layer's experts take once more."""
        found = [(linear.quantized_format, linear) for linear in experts.linears]
        return sum(self.operations.quantized_bytes(stored, *linear.shape) for stored, linear in found if stored)

    def _parameters(self) -> list[Tensor]:
        """The parameters without the weights that stay quantised."""
        left_out = {id(module.weight) for module, _ in self._quantized()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in left_out]

    def describe_quantization(self) -> str | None:
        """Say in a line what becomes of quantised weights; None: there are none."""
        if self.quantization is not None:
            eight = ", but embedding and head to 8 bits" if BITS[self.quantization] < 8 else ""
            return f"weights of products are quantised to {self.quantization} in groups of {GROUP_SIZE}{eight}"
        if not self.checkpoint.formats:
            return None
        linears = [module for module in self.model.modules() if isinstance(module, Linear)]
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"weights are stored in {', '.join(self.checkpoint.formats)}: {len(self._quantized())} of {len(linears)} "
            f"products read them as they are, whatever else is quantised is widened to {dtype}"
        )

    def describe_weights(self) -> str:
        """Name the format of the weights: what they are quantised to, else what they are held in."""
        return self.quantization or " and ".join(self.checkpoint.formats) or self.describe_dtypes()

    def describe_dtypes(self) -> str:
        """Say what the weights of products and embeddings are in, which need not be what the model computes in."""
        modules = [module for module in self.model.modules() if isinstance(module, Linear | Embedding)]
        stored = {stored.describe() for _, stored in self._quantized()}
        whole = {module.weight.dtype for module in modules if _is_whole(module) and module.weight is not None}
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in whole)
        return " and ".join([*sorted(stored), *dtypes])

    def load(
        self,
        progress: TensorProgress | None = None,
        find_kept: Callable[[str], KeptProduct | None] = lambda target: None,
    ) -> Decoder:
        """`progress` is called after each tensor with (tensors loaded, tensors in all); `find_kept` as in
        `load_weights`."""
        model, device = self.model, self.device
        # Not `to_empty`: torch lays out meta tensors with symbolic shapes, and importing their sympy takes half a
        # second.
        allocated = {id(tensor) for tensor in [*self._parameters(), *model.buffers()]}
        shared: dict[int, Tensor] = {}
        for module in model.modules():
            if isinstance(module, ExpertLinear):
                shared |= module.allocate(device)

        def allocate(tensor: Tensor) -> Tensor:
            if id(tensor) not in allocated:
                return tensor
            memory = shared.get(id(tensor))
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if memory is None else memory

        model._apply(allocate)
        load_weights(model, self.checkpoint, self.table, progress, self.shard, self.dtype, find_kept)
        if self.is_tied and model.embedding.weight is not None:
            model.head.weight = model.embedding.weight
        _finish(model, self.dtype, self.is_tied)
        return model.requires_grad_(False).eval()


def _open(path: Path, config: ModelConfig) -> Tensors:
    if is_gguf(path):
        return GgufCheckpoint(path)
    return Checkpoint(path, BY_ARCHITECTURE[config.architecture].stacks)


def _finish(model: Decoder, dtype: torch.dtype, is_tied: bool) -> None:
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Linear | ExpertLinear):
            module.finish_loading(dtype)
        elif isinstance(module, RotaryEmbedding):
            module.finish_loading()
    for module in modules:
        if isinstance(module, Embedding):
            module.finish_loading(dtype, model.head if is_tied and module is model.embedding else module.rows)
    model.bind()


def _is_whole(module: Linear | Embedding) -> bool:
    """Whether a layer's weight is not of codes."""
    return isinstance(module, Embedding) or module.quantized_format is None


def _weights(family: Family, model: Decoder, checkpoint: Tensors) -> Iterator[Weight]:
    """What the architecture's table has for this model, in the names this checkpoint uses."""
    tables = [tuple(fill_layers(table, model.config)) for table in (family.weights, *family.alternatives)]
    table = max(tables, key=lambda weights: _num_stored(weights, checkpoint)) if len(tables) > 1 else tables[0]
    prefix = family.optional_prefix
    has_prefix = any(name.startswith(prefix) for name in checkpoint.names)
    modules = {name for name, _ in model.named_modules()}
    for weight in table:
        if weight.target in modules:
            yield weight if has_prefix else replace(weight, source=weight.source.removeprefix(prefix))


def _ignored(family: Family, config: ModelConfig) -> str:
    """Return the pattern of checkpoint names that are left alone."""
    further = range(config.num_layers, config.num_layers + config.num_further_layers)
    layers = "|".join(map(str, further))
    return rf"{family.ignored}|^(model\.)?layers\.({layers})\." if layers else family.ignored


def _num_stored(table: tuple[Weight, ...], checkpoint: Tensors) -> int:
    """Return how many weights of a table are there."""
    stored = (checkpoint.stored_names(f"{weight.source}.weight") for weight in table)
    return sum(not checkpoint.names.isdisjoint(names) for names in stored)
