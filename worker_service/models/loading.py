"""Loads a checkpoint directory or a GGUF file into a model, one tensor at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire.common.gguf import is_gguf
from pagewire.kernels.quantized import BITS, GROUP_SIZE
from pagewire.network.checkpoint_files import CONFIG_FILE, CheckpointError
from pagewire.network.families import BY_ARCHITECTURE
from pagewire.network.families.family import Family
from pagewire.network.network import Network
from pagewire.network.operations import (
    OperationList,
    Part,
    Projection,
    Share,
    Table,
    Vector,
    embedding_of,
    head_of,
    weights_of,
)
from pagewire.network.rewrites import cut, fuse_updates, renamed, rewrite, tied, with_rows_of
from pagewire.network.source import load_config
from worker_service.models.checkpoint import Checkpoint, DummyTensors, Tensors
from worker_service.models.communicator import Communicator, SingleRank
from worker_service.models.decoder import Decoder
from worker_service.models.gguf_checkpoint import GgufCheckpoint
from worker_service.models.importance import Importance
from worker_service.models.linear import ExpertLinear, KeptProduct, Linear
from worker_service.models.quantized_checkpoint import QuantizedCheckpoint, formats_of
from worker_service.models.quantizing import QuantizingTensors, choose_bits
from worker_service.models.torch_operations import Operations
from worker_service.models.weights import (
    TensorProgress,
    check_weights,
    choose_formats,
    load_weights,
    targets_of,
    working_bytes,
)

# Bytes of a quantised element before packing: a code, and at most a scale and a minimum for each 16 elements.
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
    importance: Importance | None = None,
    max_model_len: int | None = None,
    storage_dtype: torch.dtype | None = None,
) -> "UnloadedModel":
    """Return a model, or one rank's part of it, whose weights are not loaded yet. The headers of the checkpoint's files
    have been checked against the model.

    Args:
        path: a directory that contains config.json and the safetensors files, or a GGUF file.
        dtype: the dtype in which the model computes. Weights are converted as they are read, unless `operations` can
            multiply in the checkpoint's dtype.
        device: the device on which the model computes.
        operations: the implementation of the model's operations; plain torch by default.
        is_dummy: draw random weights. The directory then needs no file but config.json.
        communicator: this rank, the number of ranks, and how they communicate; a single rank by default.
        quantization: "int8" or "int4" quantises float weights while they load. Supported on one rank, if `operations`
            can multiply with codes. `importance` says how much the errors of each input's weights count.
        max_model_len: the length of the longest sequence in tokens; the model's number of positions by default.
        storage_dtype: the dtype to which float32 weights are rounded, if `operations` can multiply in it; None keeps
            float32.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ValueError: the model cannot be split among the given number of ranks.
    """
    communicator, operations = communicator or SingleRank(), operations or Operations()
    network = load_config(path).serving(max_model_len)
    family = BY_ARCHITECTURE[network.architecture]
    checkpoint = DummyTensors() if is_dummy else _open(path, family)
    listed = _with_checkpoint_names(network, family, checkpoint)
    if isinstance(checkpoint, Checkpoint) and network.quantization is not None:
        checkpoint = QuantizedCheckpoint(checkpoint, formats_of(network.quantization, _modules(listed)))
        checkpoint.check_embedding(embedding_of(listed).name)
    head = head_of(listed).name
    if network.tie_word_embeddings if is_dummy else _lacks_head(checkpoint, listed, path, network):
        listed = tied(listed)
    if quantization is not None:
        assert (communicator.size, checkpoint.formats) == (1, ()), "refused before"
        checkpoint, listed = _quantize_all(listed, checkpoint, BITS[quantization], operations, network, importance)
    if communicator.size == 1:
        listed = _share_embedding_rows(listed, checkpoint, operations)
    listed = tuple(fuse_updates(cut(listed, communicator.rank, communicator.size)))
    with torch.device("meta"):
        model = Decoder(replace(network, operations=listed), operations, communicator).to(dtype)
    _keep_float32(model, device)
    choose_formats(model, checkpoint, dtype, storage_dtype, lambda element: operations.can_store(element, dtype))
    targets = [target for place in model.places for target in targets_of(model, place)]
    unused = check_weights(model, checkpoint, targets, family.ignored, head)
    num_bytes = working_bytes(checkpoint, targets)
    return UnloadedModel(model, checkpoint, dtype, device, operations, unused, num_bytes, quantization)


def _with_checkpoint_names(network: Network, family: Family, checkpoint: Tensors) -> OperationList:
    """Return the operations of a model, with the names of the weights adapted to the names that this checkpoint uses. A
    model family may have several naming schemes (renamings). The scheme that matches the most tensors of the checkpoint
    is chosen."""
    named = (renamed(network.operations, renaming) for renaming in family.renamings)
    best = max(named, key=lambda each: _num_stored(each, checkpoint))
    embedding, head = embedding_of(best), head_of(best)
    stored = {each.name for each in (embedding, head) if f"{each.name}.weight" in checkpoint.names}
    if not network.tie_word_embeddings or stored != {head.name}:
        return best
    # `safetensors.torch.save_model` stores one tensor of a tied pair, which can be the head.
    return rewrite(best, {Table: lambda table: replace(table, name=head.name) if table == embedding else table})


def _num_stored(listed: OperationList, checkpoint: Tensors) -> int:
    """Return how many weights the checkpoint has under the names in a list of operations. Norms count too, because the
    tensors of quantised matrices have other names."""
    names = {
        name
        for weight in weights_of(listed)
        for name in ([weight.name] if isinstance(weight, Vector) else [f"{each}.weight" for each in weight.modules])
    }
    return sum(not checkpoint.names.isdisjoint(checkpoint.stored_names(name)) for name in names)


def _lacks_head(checkpoint: Tensors, listed: OperationList, path: Path, network: Network) -> bool:
    """Return whether the checkpoint has no LM head, so that the model uses the embedding's weight (tied embeddings). As
    in transformers, an LM head in the checkpoint is used even if config.json ties it to the embedding. Raises
    CheckpointError if the LM head is missing and config.json does not tie it."""
    head = head_of(listed).name
    if not checkpoint.names.isdisjoint(checkpoint.stored_names(f"{head}.weight")):
        return False
    if not network.tie_word_embeddings:
        raise CheckpointError(
            f"tensor {head}.weight is missing in {path}; if the head shares the embedding's weight, set "
            f"tie_word_embeddings to true in {CONFIG_FILE}"
        )
    return True


def _modules(listed: OperationList) -> list[str]:
    """Return the checkpoint names of all linear modules in a list of operations. These are the modules whose weights
    may be quantised."""
    projections = [weight for weight in weights_of(listed) if type(weight) is Projection]
    return [module for projection in projections for module in projection.modules]


def _share_embedding_rows(listed: OperationList, checkpoint: Tensors, operations: Operations) -> OperationList:
    """Save memory by reading embedding rows from the weight of a linear layer. If the embedding is tied, it reads the
    weight of the LM head. If the checkpoint's embedding is quantised in a format that can be kept in memory, the
    embedding becomes a linear layer of its own. Return the changed list of operations, or the same list if neither is
    the case."""
    embedding, head = embedding_of(listed), head_of(listed)
    if embedding.name == head.name:
        return with_rows_of(listed, head)
    assert type(embedding) is Table
    stored = checkpoint.format(f"{embedding.name}.weight", embedding.width)
    if stored is None or not stored.group_size or not operations.can_store(stored.element, torch.float32):
        return listed
    rows = Part(embedding.name, Share.of(embedding.num_rows))
    return with_rows_of(listed, Projection((rows,), Share.of(embedding.width)))


def _quantize_all(
    listed: OperationList,
    checkpoint: Tensors,
    bits: int,
    operations: Operations,
    network: Network,
    importance: Importance | None,
) -> tuple[QuantizingTensors, OperationList]:
    """Wrap a float checkpoint so that its linear weights are quantised to `bits`, or more (see `choose_bits`), while
    they are read. Return the wrapped checkpoint and the operations adapted to it, in which no matrix is transposed."""
    by_name = choose_bits(listed, bits)
    found = [weight for weight in weights_of(listed) if type(weight) is Projection and weight.is_transposed]
    transposed = frozenset(f"{module}.weight" for weight in found for module in weight.modules)
    unit = math.lcm(*(heads.head_dim for heads in network.layers))
    by_weight = {} if importance is None else importance.by_weight(listed)
    tensors = QuantizingTensors(checkpoint, operations.quantize, by_name, by_weight, transposed, unit)
    return tensors, rewrite(listed, {Projection: lambda projection: replace(projection, is_transposed=False)})


def _keep_float32(model: Decoder, device: torch.device) -> None:
    """Convert to float32 the weights that the model uses in float32, even if it computes in another dtype: routers,
    attention sinks, and norm weights to which 1 is added. On a CPU, the cosines and sines of the rotary embedding are
    kept in float32 too, because the fused CPU decoder needs them in float32 and would otherwise make a second copy."""
    model.keep_float32()
    for rope in model.ropes if device.type == "cpu" else ():
        rope.keep_float32()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory, in bytes, that a model needs on its device."""

    held: int  # once the model is loaded
    peak: int  # the maximum at any time while it loads


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model whose weights are not allocated yet, the checkpoint from which they will be read, and the settings for
    loading them."""

    model: Decoder
    checkpoint: Tensors
    dtype: torch.dtype
    device: torch.device
    operations: Operations
    unused: Mapping[str, Sequence[str]]  # the checkpoint's tensors that the model does not use, by part
    reading_bytes: int  # the most memory besides the model that reading a weight needs
    quantization: str | None = None  # the format to which weights are quantised while they load

    def footprint(self) -> Footprint:
        """Compute how much memory, in bytes, the model needs after loading, and at the peak during loading. The peak
        includes the copy that packing a weight makes. The original is released before the next weight is packed. For a
        quantised weight, the peak also includes its decoded form."""
        operations, experts = self.operations, self._experts()
        scaled = [linear for linear in self._linears() if linear.format.group_size]
        floats = [(linear, linear.weight.nbytes) for linear in self._linears() if linear.weight is not None]
        floats = [(linear, size) for linear, size in floats if not linear.format.group_size]
        weights = sum(tensor.nbytes for tensor in [*self._parameters(), *self.model.buffers()])
        weights += sum(map(self._packed_bytes, scaled))
        packs, has_rows = operations.packs(self.dtype, self.device), operations.supports_row_lookup()
        held = weights + sum(
            size for linear, size in floats if packs and not has_rows and linear.projection.has_row_lookup
        )
        copies = [self.reading_bytes, *map(self._unpacked_bytes, scaled)]
        if packs:  # The weights of a layer's experts share one allocation, which is released after the last expert.
            copies += [*(size for _, size in floats), *(each.num_bytes() for each in experts)]
        if self.device.type != "cpu":  # on a GPU, the experts are joined in one allocation
            copies += [
                sum(self._packed_bytes(linear) for linear in each.linears if linear.format.group_size)
                for each in experts
            ]
        else:
            copies += [rope.working_bytes() for rope in self.model.ropes]
        return Footprint(held, peak=max(held, weights + max(copies)))

    def _linears(self) -> list[Linear]:
        return [place.holder for place in self.model.places if type(place.weight) is Projection]

    def _experts(self) -> list[ExpertLinear]:
        return list({place.experts: None for place in self.model.places if place.experts is not None})

    def _packed_bytes(self, linear: Linear) -> int:
        return self.operations.quantized_bytes(linear.format, *linear.shape)

    def _unpacked_bytes(self, linear: Linear) -> int:
        """Estimate the temporary memory, in bytes, of the unpacked codes and scales of a quantised layer while its
        weight is packed. The estimate is doubled if parts of the weight must be joined first."""
        is_whole = self.quantization is not None and len(linear.projection.parts) == 1
        return int((1 if is_whole else 2) * _UNPACKED_BYTES * math.prod(linear.shape))

    def _parameters(self) -> list[Tensor]:
        """Return all parameters of the model except for weights that stay quantised."""
        left_out = {id(linear.weight) for linear in self._linears() if linear.format.group_size}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in left_out]

    def describe_quantization(self) -> str | None:
        """Return a log line that tells the operator how the model's quantised weights are used. Return None if no
        weight is quantised."""
        if self.quantization is not None:
            more = ", embedding, head and some others to 6 bits" if BITS[self.quantization] < 8 else ""
            return f"linear weights are quantised to {self.quantization} in groups of {GROUP_SIZE}{more}"
        if not self.checkpoint.formats:
            return None
        linears, dtype = self._linears(), str(self.dtype).removeprefix("torch.")
        num_scaled = sum(linear.format.group_size > 0 for linear in linears)
        return (
            f"weights are stored in {', '.join(self.checkpoint.formats)}: {num_scaled} of {len(linears)} linear "
            f"layers use them directly, other quantised weights are widened to {dtype}"
        )

    def describe_weights(self) -> str:
        """Return the name of the format of the model's weights, for logs and status. If the weights are quantised while
        loading, it is the format to which they are quantised. Otherwise it is the checkpoint's quantised format, or, if
        no weight is quantised, the names of the float dtypes."""
        return self.quantization or " and ".join(self.checkpoint.formats) or self.describe_dtypes()

    def describe_dtypes(self) -> str:
        """Return the names of the dtypes in which linear layers and embeddings keep their weights, joined by "and".
        They may differ from the dtype in which the model computes."""
        formats = [place.holder.format for place in self.model.places if place.holder is not None]
        # Formats with scales come first.
        found = sorted({(not each.group_size, each.describe()) for each in formats})
        return " and ".join(described for _, described in found)

    def load(
        self,
        progress: TensorProgress | None = None,
        find_kept: Callable[[str], KeptProduct | None] = lambda target: None,
    ) -> Decoder:
        """Load the weights and return the model, ready to compute. After each tensor, `progress` is called with the
        number of tensors loaded and the total. `find_kept` returns a quantised weight that an earlier start already
        packed, by the name of the weight, or None. Raises CheckpointError if a file cannot be read."""
        model, device = self.model, self.device
        # Do not use `to_empty`: torch lays out meta tensors with symbolic shapes, which imports sympy and takes half a
        # second.
        allocated = {id(tensor) for tensor in [*self._parameters(), *model.buffers()]}
        shared: dict[int, Tensor] = {}
        for experts in self._experts():
            shared |= experts.allocate(device)

        def allocate(tensor: Tensor) -> Tensor:
            if id(tensor) not in allocated:
                return tensor
            memory = shared.get(id(tensor))
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if memory is None else memory

        model._apply(allocate)
        load_weights(model, self.checkpoint, progress, self.dtype, find_kept)
        _finish(model, self.dtype)
        return model.requires_grad_(False).eval()


def _open(path: Path, family: Family) -> Tensors:
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path, family.stacks)


def _finish(model: Decoder, dtype: torch.dtype) -> None:
    for place in model.places:
        if place.holder is not None and place.experts is None:
            place.holder.finish_loading(dtype)
    for experts in dict.fromkeys(place.experts for place in model.places if place.experts is not None):
        experts.finish_loading(dtype)
    for rope in model.ropes:
        rope.finish_loading()
    model.bind()
