"""Chooses the formats of a model's weights, and loads the weights from a checkpoint."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.operations import Part, Projection, Share, Table, Vector
from pagewire.network.unused_tensors import is_apart, unused_parts
from worker_service.models.checkpoint import Piece, Tensors
from worker_service.models.decoder import Decoder, Place
from worker_service.models.linear import KeptProduct, Linear

# For each parameter: its name in the checkpoint, and the pieces to read.
Targets = Sequence[tuple[str, Sequence[Piece]]]
# Names of scales for activations and caches. They are ignored, whatever the format of the weights.
_UNFOLLOWED_SCALES = (
    r"\.((input|output|activation)_(scale|zero_point)|input_global_scale|(kv|[qkv])_(scale|zero_point))$"
)
# Called after each tensor with (tensors loaded, total number of tensors).
TensorProgress = Callable[[int, int], None]


def load_weights(
    model: Decoder,
    checkpoint: Tensors,
    progress: TensorProgress | None,
    dtype: torch.dtype,
    find_kept: Callable[[str], KeptProduct | None] = lambda target: None,
) -> None:
    """Copy every tensor of the checkpoint, or this rank's part of the tensor, into the model. A weight that stays
    quantised is packed immediately after it was read, since its unpacked codes need more memory than the packed weight.

    The parameters of `model` must be allocated, except weights that stay quantised, and `check_weights` must have
    passed. `find_kept` returns the packed copy of a quantised weight from an earlier start, by the name of the weight,
    or None. Raises CheckpointError if a file cannot be read.
    """
    found = [(place, dict(targets_of(model, place))) for place in model.places]
    num_loaded, num_all = 0, sum(len(sources) for _, sources in found)
    for place, sources in found:
        product = place.holder if place.holder is not None and place.holder.format.group_size else None
        kept = None if product is None else find_kept(place.name)
        for name, pieces in sources.items():
            if product is not None and name.endswith(".weight"):
                for piece in pieces if kept is None else ():
                    _add_codes(product, checkpoint, name, piece)
            else:
                for piece in pieces:
                    checkpoint.copy(name, piece)
            num_loaded += 1
            if progress is not None:
                progress(num_loaded, num_all)
        if product is not None:
            product.finish_loading(dtype, kept)


def _add_codes(product: Linear, checkpoint: Tensors, name: str, piece: Piece) -> None:
    """Read one part of a linear layer's quantised weight and add it to the layer. If the part has fewer rows than this
    rank's share of the layer, add rows of zeros. This is the case for the LM head on the last of several ranks, where
    the vocabulary is padded."""
    num_rows, in_size = piece.target.shape
    if num_rows:
        product.add_part(checkpoint.quantized(name, piece))
    num_missing = sum(product.projection.out_sizes) - num_rows if len(product.projection.out_sizes) == 1 else 0
    if num_missing:
        codes = torch.zeros(num_missing, in_size, dtype=torch.int8)
        product.add_part(StoredWeight(codes, torch.zeros(num_missing, 1), in_size))


def check_weights(
    model: nn.Module, checkpoint: Tensors, targets: Targets, ignored: str, head: str
) -> dict[str, list[str]]:
    """Check that the names and shapes of the checkpoint's tensors fit a model. The model's parameters need not be
    allocated. Return the tensors that the model does not use, as `unused_parts` does.

    `targets` lists all tensors to read and the parameters they fill. `ignored` is a regular expression for the names of
    checkpoint tensors that are not weights. `head` is the name of the LM head, even if the model uses the embedding's
    weight. Raises CheckpointError if a tensor is missing, has a wrong shape, or has no place in the model. Raises
    ValueError if a weight cannot be cut into this rank's part.
    """
    known = frozenset().union(*(checkpoint.stored_names(name) for name, _ in targets))
    unread, owned = re.compile(rf"{ignored}|{_UNFOLLOWED_SCALES}"), known | {f"{head}.weight"}
    parts = unused_parts(checkpoint.names - known, owned)
    inside = {part for part, names in parts.items() if checkpoint.is_exact or not is_apart(part, names, owned)}
    unknown = sorted(name for part in inside for name in parts[part] if not unread.search(name))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(f"tensor {unknown[0]}{more} in the checkpoint has no place in {type(model).__name__}")
    for name, pieces in targets:
        for piece in pieces:
            checkpoint.check(name, piece)
    return parts


def choose_formats(
    model: Decoder,
    checkpoint: Tensors,
    computed: torch.dtype,
    narrowed: torch.dtype | None,
    can_store: Callable[[torch.dtype], bool],
) -> None:
    """Choose the format in which the weight of every linear layer and embedding is kept in memory. Call this before the
    weights are read.

    The checkpoint's format is kept if the model can use it. Otherwise the weight is converted to the dtype `computed`.
    Float32 weights are converted to `narrowed` unless `narrowed` is None. If the parts of a merged projection have
    different element types, or the experts of a layer do, all of them are converted to `computed`.
    """
    kinds = [(place, type(place.weight)) for place in model.places]
    places = [place for place, kind in kinds if kind is Table or (kind is Projection and not place.weight.is_float32)]
    found = [(place, list(_stored_formats(checkpoint, place.weight))) for place in places]
    elements: dict[nn.Module, set[torch.dtype | None]] = {}
    for place, formats in found:
        own = {None if each is None else each.element for each in formats}
        elements.setdefault(place.experts or place.holder, set()).update(own)
    for place, formats in found:
        (element, *others) = elements[place.experts or place.holder]
        if element == torch.float32 and narrowed is not None:
            element = narrowed
        if element is None or others or not can_store(element):
            chosen = StoredFormat(computed)
        else:
            joined = StoredFormat.join([each for each in formats if each is not None])
            # Routed slots are multiplied without rounding.
            chosen = replace(joined, element=element, rounds_inputs=joined.rounds_inputs and place.experts is None)
        place.holder.format = chosen
        if not chosen.group_size:
            place.holder.weight = nn.Parameter(place.holder.weight.to(chosen.element), requires_grad=False)


def _stored_formats(checkpoint: Tensors, weight: Any) -> Iterator[StoredFormat | None]:
    """Yield the checkpoint's format of each part of a merged weight. The value is None for a part that cannot be kept
    as stored, for example a quantised embedding table or a transposed quantised weight."""
    is_table = type(weight) is Table
    for module in weight.modules:
        stored = checkpoint.format(f"{module}.weight", weight.width if is_table else weight.in_size)
        has_scales = stored is not None and stored.group_size > 0
        yield None if has_scales and (is_table or weight.is_transposed) else stored


def working_bytes(checkpoint: Tensors, targets: Targets) -> int:
    """Return an upper bound on the temporary memory, in bytes, that reading the weights needs. Weights are read one
    after the other, so it is the maximum over all weights."""
    sizes = {name: math.prod(pieces[0].shape or pieces[0].target.shape) for name, pieces in targets if pieces}
    return max((checkpoint.working_bytes(name, size) for name, size in sizes.items()), default=0)


def targets_of(model: Decoder, place: Place) -> Iterator[tuple[str, list[Piece]]]:
    """List what must be read to fill one weight of the model. Yield (name, pieces): the name of a tensor in the
    checkpoint, and the parts of this tensor that this rank reads, each with the memory to fill."""
    weight, holder = place.weight, place.holder
    if type(weight) is Vector and not weight.is_stored:
        model.get_parameter(place.name).data.fill_(1)
    elif type(weight) is Vector and weight.parts:
        for own, value in zip(weight.parts, model.get_parameter(place.name).data.split(1), strict=True):
            yield f"{weight.name}.{own}", [Piece(value)]
    elif type(weight) is Vector:
        yield from _vector_targets(weight, model.get_parameter(place.name).data)
    elif type(weight) is Table:
        num_rows = weight.num_skipped + weight.num_rows
        rows = Share(weight.num_rows, num_rows, weight.num_skipped)
        yield f"{weight.name}.weight", [_piece(holder.weight.data, rows, Share.of(weight.width))]
    else:
        for kind, parameter in (("weight", holder.weight), ("bias", holder.bias)):
            pieces: dict[str, list[Piece]] = {}
            first = 0
            for part in _joined(weight.parts) if parameter is not None else ():
                target = parameter.data[first : first + part.rows.size]
                first += part.rows.size
                piece = _piece(target, part.stored_rows, *[weight.columns] * (target.dim() - 1))
                if part.period:
                    shape = tuple(share.whole for share in (part.stored_rows, weight.columns)[: target.dim()])
                    index = piece.index or (slice(0, part.stored_rows.size),)
                    piece = Piece(target, shape, index, torch.tensor(part.row_indexes))
                turned = piece.transposed() if weight.is_transposed and target.dim() == 2 else piece
                pieces.setdefault(f"{part.name}.{kind}", []).append(turned)
            yield from pieces.items()


def _vector_targets(vector: Vector, values: Tensor) -> Iterator[tuple[str, list[Piece]]]:
    share, size = vector.values, vector.row_size
    if not size:
        yield vector.name, [_piece(values, share)]
    elif vector.sections:
        parts = values.split([section.size for section in vector.sections])
        yield vector.name, [_rows_piece(*each, size) for each in zip(parts, vector.sections, strict=True)]
    elif "{head}" in vector.name:
        own = dict(enumerate(values.split(size), share.first // size))
        for head in range(share.whole // size):  # the tensors of other ranks are known, too
            yield vector.name.format(head=head), [Piece(own[head])] if head in own else []
    else:
        yield vector.name, [_rows_piece(values, share, size)]


def _rows_piece(values: Tensor, share: Share, row_size: int) -> Piece:
    """Return a request to read whole rows of a matrix with rows of `row_size` into the vector `values`."""
    rows = Share(share.size // row_size, share.whole // row_size, share.first // row_size)
    return _piece(values.view(-1, row_size), rows, Share.of(row_size))


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Join parts of a merged projection that are adjacent rows of the same checkpoint tensor, so that they are read
    with one request. Yield the joined parts."""
    joined, *others = parts
    for part in others:
        are_adjacent = part.rows.first == joined.rows.first + joined.rows.size
        if part.name == joined.name and are_adjacent and not part.period and not joined.period:
            joined = replace(joined, rows=replace(joined.rows, size=joined.rows.size + part.rows.size))
        else:
            yield joined
            joined = part
    yield joined


def _piece(target: Tensor, *shares: Share) -> Piece:
    """Return a request to read a checkpoint tensor into `target`. `shares` gives the part of each dimension of the
    tensor that this rank needs."""
    if all(share.is_whole for share in shares):
        return Piece(target)
    places = [share.stored for share in shares]
    columns = [slice(None) if share.is_whole else share.stored for share in shares[1:]]
    index = (places[0], *columns) if columns != [slice(None)] else (places[0],)
    return Piece(target[: places[0].stop - places[0].start], tuple(share.whole for share in shares), index)
