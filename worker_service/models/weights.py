"""From tensors of a checkpoint to what holds the weights of a model: formats, places, and the loader."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.weight import HeldFormat, HeldWeight
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.operations import Part, Projection, Share, Table, Vector
from worker_service.models.checkpoint import Piece, Tensors
from worker_service.models.decoder import Decoder, Place
from worker_service.models.linear import KeptProduct, Linear

# Of each parameter: its name in the checkpoint, and what is read of it and where it goes.
Targets = Sequence[tuple[str, Sequence[Piece]]]
# Names of scales for activations and caches, which are not followed, whatever the weights beside them are.
_UNFOLLOWED_SCALES = (
    r"\.((input|output|activation)_(scale|zero_point)|input_global_scale|(kv|[qkv])_(scale|zero_point))$"
)
# Called after each tensor with (tensors loaded, tensors in all).
TensorProgress = Callable[[int, int], None]


def load_weights(
    model: Decoder,
    checkpoint: Tensors,
    progress: TensorProgress | None,
    dtype: torch.dtype,
    find_kept: Callable[[str], KeptProduct | None] = lambda target: None,
) -> None:
    """Copies every tensor of the checkpoint, or this rank's part of it, to its parameter. What stays quantised goes to
    its product at once, since its codes take more memory than that.

    Args:
        model: its parameters are allocated, but of what stays quantised, and `check_weights` has passed it.
        find_kept: finds the weight of a place that stays quantised, by its name, where it is packed already.

    Raises:
        CheckpointError: a file cannot be read.
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
    """Adds a projection, whose last rows may stand for nothing: those of a head on the last of several ranks."""
    num_rows, in_size = piece.target.shape
    if num_rows:
        product.add_part(checkpoint.quantized(name, piece))
    num_missing = sum(product.projection.out_sizes) - num_rows if len(product.projection.out_sizes) == 1 else 0
    if num_missing:
        codes = torch.zeros(num_missing, in_size, dtype=torch.int8)
        product.add_part(HeldWeight(codes, torch.zeros(num_missing, 1), in_size))


def check_weights(model: nn.Module, checkpoint: Tensors, targets: Targets, ignored: str) -> None:
    """Compares the checkpoint with a model whose parameters need not be allocated.

    Args:
        targets: of the model.
        ignored: pattern of checkpoint names that hold no weights.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or has no place in the model.
        ValueError: a weight cannot be cut into this rank's part.
    """
    known = frozenset().union(*(checkpoint.stored_names(name) for name, _ in targets))
    unread = re.compile(rf"{ignored}|{_UNFOLLOWED_SCALES}")
    unknown = sorted(name for name in checkpoint.names - known if not unread.search(name))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise CheckpointError(f"tensor {unknown[0]}{more} in the checkpoint has no place in {type(model).__name__}")
    for name, pieces in targets:
        for piece in pieces:
            checkpoint.check(name, piece)


def choose_formats(
    model: Decoder,
    checkpoint: Tensors,
    computed: torch.dtype,
    narrowed: torch.dtype | None,
    can_hold: Callable[[torch.dtype], bool],
) -> None:
    """Gives weights of products and embeddings the format in which the checkpoint has them, or for float32 another one
    where that is `narrowed`, as far as it can be held, else `computed`.

    The parts of a merged one must agree in their elements, and all experts of a layer. Parameters hold no values yet.
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
        if element is None or others or not can_hold(element):
            chosen = HeldFormat(computed)
        else:
            joined = HeldFormat.join([each for each in formats if each is not None])
            # Slots are multiplied as they are.
            chosen = replace(joined, element=element, rounds_inputs=joined.rounds_inputs and place.experts is None)
        place.holder.format = chosen
        if not chosen.group_size:
            place.holder.weight = nn.Parameter(place.holder.weight.to(chosen.element), requires_grad=False)


def _stored_formats(checkpoint: Tensors, weight: Any) -> Iterator[HeldFormat | None]:
    """Yield the formats of a weight's parts. None: not held so, as tables with scales, and what is transposed."""
    is_table = type(weight) is Table
    for module in weight.modules:
        stored = checkpoint.format(f"{module}.weight", weight.width if is_table else weight.in_size)
        has_scales = stored is not None and stored.group_size > 0
        yield None if has_scales and (is_table or weight.is_transposed) else stored


def working_bytes(checkpoint: Tensors, targets: Targets) -> int:
    """Return how much memory beside the parameters reading any one weight takes at most."""
    sizes = {name: math.prod(pieces[0].shape or pieces[0].target.shape) for name, pieces in targets}
    return max((checkpoint.working_bytes(name, size) for name, size in sizes.items()), default=0)


def targets_of(model: Decoder, place: Place) -> Iterator[tuple[str, list[Piece]]]:
    """Yield where this rank's part of each parameter of a place is in the checkpoint: the name of a tensor there, and
    what is read of it and where that goes."""
    weight, holder = place.weight, place.holder
    if type(weight) is Vector:
        yield weight.name, [_piece(model.get_parameter(place.name).data, weight.values)]
    elif type(weight) is Table:
        yield f"{weight.name}.weight", [Piece(holder.weight.data)]
    else:
        for kind, parameter in (("weight", holder.weight), ("bias", holder.bias)):
            pieces: dict[str, list[Piece]] = {}
            first = 0
            for part in _joined(weight.parts) if parameter is not None else ():
                target = parameter.data[first : first + part.rows.size]
                first += part.rows.size
                piece = _piece(target, part.rows, *[weight.columns] * (target.dim() - 1))
                turned = piece.transposed() if weight.is_transposed and target.dim() == 2 else piece
                pieces.setdefault(f"{part.name}.{kind}", []).append(turned)
            yield from pieces.items()


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield neighbours that lie one behind the other in one tensor as one part."""
    joined, *others = parts
    for part in others:
        if part.name == joined.name and part.rows.first == joined.rows.first + joined.rows.size:
            joined = replace(joined, rows=replace(joined.rows, size=joined.rows.size + part.rows.size))
        else:
            yield joined
            joined = part
    yield joined


def _piece(target: Tensor, *shares: Share) -> Piece:
    """Return what a rank has of a tensor, by the dimensions that are shared out."""
    if all(share.is_whole for share in shares):
        return Piece(target)
    places = [share.stored for share in shares]
    columns = [slice(None) if share.is_whole else share.stored for share in shares[1:]]
    index = (places[0], *columns) if columns != [slice(None)] else (places[0],)
    return Piece(target[: places[0].stop - places[0].start], tuple(share.whole for share in shares), index)
