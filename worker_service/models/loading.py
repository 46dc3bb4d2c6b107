"""Loads a checkpoint directory or a GGUF file into a model, tensor by tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire.common.gguf import is_gguf
from pagewire.kernels.quantized import BITS, GROUP_SIZE
from pagewire.network.checkpoint_files import CONFIG_FILE, CheckpointError
from pagewire.network.families import BY_ARCHITECTURE
from pagewire.network.families.family import Family
from pagewire.network.operations import (
    Listing,
    Part,
    Projection,
    Share,
    Table,
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
from worker_service.models.linear import ExpertLinear, KeptProduct, Linear
from worker_service.models.quantized_checkpoint import QuantizedCheckpoint, formats_of
from worker_service.models.quantizing import QuantizingTensors
from worker_service.models.torch_operations import Operations
from worker_service.models.weights import (
    TensorProgress,
    check_weights,
    choose_formats,
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
    communicator, operations = communicator or SingleRank(), operations or Operations()
    network = load_config(path).serving(max_model_len)
    family = BY_ARCHITECTURE[network.architecture]
    checkpoint = DummyTensors() if is_dummy else _open(path, family)
    listed = _named(network.operations, family, checkpoint)
    is_tied = network.tie_word_embeddings
    if is_tied if is_dummy else _lacks_head(checkpoint, listed, path, is_tied=is_tied):
        listed = tied(listed)
    if isinstance(checkpoint, Checkpoint) and network.quantization is not None:
        checkpoint = QuantizedCheckpoint(checkpoint, formats_of(network.quantization, _modules(listed)))
    if quantization is not None:
        assert (communicator.size, checkpoint.formats) == (1, ()), "refused before"
        checkpoint, listed = _quantizing(listed, checkpoint, BITS[quantization], operations, network.heads.head_dim)
    if communicator.size == 1:
        listed = _with_rows(listed, checkpoint, operations)
    listed = tuple(fuse_updates(cut(listed, communicator.rank, communicator.size)))
    with torch.device("meta"):
        model = Decoder(replace(network, operations=listed), operations, communicator).to(dtype)
    _keep_float32(model, device)
    choose_formats(model, checkpoint, dtype, held_dtype, lambda element: operations.can_hold(element, dtype))
    targets = [target for place in model.places for target in targets_of(model, place)]
    check_weights(model, checkpoint, targets, "|".join(filter(None, (family.ignored, network.ignored))))
    num_bytes = working_bytes(checkpoint, targets)
    return UnloadedModel(
        model, checkpoint, dtype, device, operations, reading_bytes=num_bytes, quantization=quantization
    )


def _named(listed: Listing, family: Family, checkpoint: Tensors) -> Listing:
    """Return the model in the names that this checkpoint has for its weights."""
    named = (renamed(listed, renaming) for renaming in family.renamings)
    return max(named, key=lambda each: _num_stored(each, checkpoint))


def _num_stored(listed: Listing, checkpoint: Tensors) -> int:
    names = (f"{module}.weight" for module in _modules(listed))
    return sum(not checkpoint.names.isdisjoint(checkpoint.stored_names(name)) for name in names)


def _lacks_head(checkpoint: Tensors, listed: Listing, path: Path, *, is_tied: bool) -> bool:
    """Return whether the embedding is the head too. As in transformers, a head that the checkpoint holds counts, though
    config.json says that they are tied. Raises CheckpointError where there is neither."""
    head = head_of(listed).name
    if not checkpoint.names.isdisjoint(checkpoint.stored_names(f"{head}.weight")):
        return False
    if not is_tied:
        raise CheckpointError(
            f"tensor {head}.weight is missing in {path}; if the model's head is its embedding, set tie_word_embeddings "
            f"to true in {CONFIG_FILE}"
        )
    return True


def _modules(listed: Listing) -> list[str]:
    """The checkpoint's names of what may be quantised."""
    projections = [weight for weight in weights_of(listed) if type(weight) is Projection]
    return [module for projection in projections for module in projection.modules]


def _with_rows(listed: Listing, checkpoint: Tensors, operations: Operations) -> Listing:
    """Take the rows of tokens from the head where it has their weight, or from a product of their own where the
    checkpoint has codes that can be held."""
    embedding, head = embedding_of(listed), head_of(listed)
    if embedding.name == head.name:
        return with_rows_of(listed, head)
    assert type(embedding) is Table
    stored = checkpoint.format(f"{embedding.name}.weight", embedding.width)
    if stored is None or not stored.group_size or not operations.can_hold(stored.element, torch.float32):
        return listed
    rows = Part(embedding.name, Share.of(embedding.num_rows))
    return with_rows_of(listed, Projection((rows,), Share.of(embedding.width)))


def _quantizing(
    listed: Listing, checkpoint: Tensors, bits: int, operations: Operations, head_dim: int
) -> tuple[QuantizingTensors, Listing]:
    """Return the checkpoint whose weights are codes, and what it then has: the head and the embedding are of 8 bits,
    and no matrix is transposed."""
    found = [weight for weight in weights_of(listed) if type(weight) is Projection and not weight.is_float32]
    by_name = {f"{module}.weight": bits for weight in found for module in weight.modules}
    by_name |= {f"{weight.name}.weight": 8 for weight in (head_of(listed), embedding_of(listed))}
    transposed = frozenset(f"{module}.weight" for weight in found if weight.is_transposed for module in weight.modules)
    tensors = QuantizingTensors(checkpoint, operations.quantize, by_name, transposed, head_dim)
    return tensors, rewrite(listed, {Projection: lambda projection: replace(projection, is_transposed=False)})


def _keep_float32(model: Decoder, device: torch.device) -> None:
    """Leaves in float32 what is computed in it: routers, sinks, and weights of norms to which one is added. On a CPU
    cosines and sines stay so too, which a fused decoder reads: it would make tables of its own of others."""
    model.keep_float32()
    for rope in model.ropes if device.type == "cpu" else ():
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
    dtype: torch.dtype
    device: torch.device
    operations: Operations
    reading_bytes: int  # that reading a weight takes at most beside the model
    quantization: str | None = None  # what its weights become while they load

    def footprint(self) -> Footprint:
        """Return how much memory the model takes. Packing a weight for its product copies it, and the weight is let go
        before the next one is packed. A weight that is quantised is decoded on the way."""
        operations, experts = self.operations, self._experts()
        scaled = [linear for linear in self._linears() if linear.format.group_size]
        floats = [(linear, linear.weight.nbytes) for linear in self._linears() if linear.weight is not None]
        floats = [(linear, size) for linear, size in floats if not linear.format.group_size]
        weights = sum(tensor.nbytes for tensor in [*self._parameters(), *self.model.buffers()])
        weights += sum(map(self._packed_bytes, scaled))
        packs, has_rows = operations.packs(self.dtype, self.device), operations.takes_rows()
        held = weights + sum(size for linear, size in floats if packs and not has_rows and linear.projection.gives_rows)
        copies = [self.reading_bytes, *map(self._unpacked_bytes, scaled)]
        if packs:  # the weights of a layer's experts lie in one memory, which is let go with the last of them
            copies += [*(size for _, size in floats), *(each.num_bytes() for each in experts)]
        if self.device.type != "cpu":  # where experts are joined in one memory
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
        """Return what codes and scales take beside the panels while these are packed: twice, where parts are joined."""
        is_whole = self.quantization is not None and len(linear.projection.parts) == 1
        return int((1 if is_whole else 2) * _UNPACKED_BYTES * math.prod(linear.shape))

    def _parameters(self) -> list[Tensor]:
        """The parameters without the weights that stay quantised."""
        left_out = {id(linear.weight) for linear in self._linears() if linear.format.group_size}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in left_out]

    def describe_quantization(self) -> str | None:
        """Say in a line what becomes of quantised weights; None: there are none."""
        if self.quantization is not None:
            eight = ", but embedding and head to 8 bits" if BITS[self.quantization] < 8 else ""
            return f"weights of products are quantised to {self.quantization} in groups of {GROUP_SIZE}{eight}"
        if not self.checkpoint.formats:
            return None
        linears, dtype = self._linears(), str(self.dtype).removeprefix("torch.")
        num_scaled = sum(linear.format.group_size > 0 for linear in linears)
        return (
            f"weights are stored in {', '.join(self.checkpoint.formats)}: {num_scaled} of {len(linears)} products read "
            f"them as they are, whatever else is quantised is widened to {dtype}"
        )

    def describe_weights(self) -> str:
        """Name the format of the weights: what they are quantised to, else what they are held in."""
        return self.quantization or " and ".join(self.checkpoint.formats) or self.describe_dtypes()

    def describe_dtypes(self) -> str:
        """Say what the weights of products and embeddings are in, which need not be what the model computes in."""
        formats = [place.holder.format for place in self.model.places if place.holder is not None]
        # Those with scales first.
        found = sorted({(not each.group_size, each.describe()) for each in formats})
        return " and ".join(described for _, described in found)

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
