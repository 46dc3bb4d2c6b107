"""From checkpoint names to parameters: the table a model file gives, and the loader that carries it out."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pagewire.common.network.checkpoint_files import CheckpointError
from pagewire.common.network.config import ModelConfig
from pagewire.common.network.families.family import Split, Weight
from pagewire.common.network.shard import Shard
from pagewire.kernels.weight import HeldFormat, HeldWeight
from worker_service.models.checkpoint import Piece, Tensors
from worker_service.models.linear import Embedding, ExpertLinear, KeptProduct, Linear

# Of each parameter: its name in the checkpoint, and what is read of it and where it goes.
Targets = Sequence[tuple[str, Sequence[Piece]]]
# Names of scales for activations and caches, which are not followed, whatever the weights beside them are.
_UNFOLLOWED_SCALES = (
    r"\.((input|output|activation)_(scale|zero_point)|input_global_scale|(kv|[qkv])_(scale|zero_point))$"
)
# Called after each tensor with (tensors loaded, tensors in all).
TensorProgress = Callable[[int, int], None]


def load_weights(
    model: nn.Module,
    checkpoint: Tensors,
    table: Iterable[Weight],
    progress: TensorProgress | None,
    shard: Shard,
    dtype: torch.dtype,
    find_kept: Callable[[str], KeptProduct | None] = lambda target: None,
) -> None:
    """Copies every tensor of the checkpoint, or this rank's part of it, to its parameter. What stays quantised goes to
    its product at once, since its codes take more memory than that.

    Args:
        model: its parameters are allocated, but of what stays quantised, and `check_weights` has passed it.
        table: as `fill_layers` gives it.
        find_kept: finds the weight of a module that stays quantised where it is packed already.

    Raises:
        CheckpointError: a file cannot be read.
    """
    by_module: dict[str, list[tuple[str, list[Piece]]]] = {}
    for weight in table:
        by_module.setdefault(weight.target, []).extend(targets_of(model, weight, shard))
    num_loaded, num_all = 0, sum(map(len, by_module.values()))
    for target, sources in by_module.items():
        module = model.get_submodule(target)
        product = module if isinstance(module, Linear) and module.quantized_format is not None else None
        kept = None if product is None else find_kept(target)
        for name, pieces in sources:
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
    num_missing = sum(product.out_sizes) - num_rows if len(product.out_sizes) == 1 else 0
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


def hold_dtypes(
    model: nn.Module,
    checkpoint: Tensors,
    table: Iterable[Weight],
    narrowed: torch.dtype | None,
    can_hold: Callable[[torch.dtype], bool],
) -> None:
    """Gives weights of products and embeddings the dtype of their tensors in the checkpoint, or for float32 another one
    where that is `narrowed`, as far as it can be held.

    The parts of a merged one must agree, and all experts of a layer. Parameters hold no values yet.
    """
    found: dict[nn.Module, set[torch.dtype | None]] = {}
    modules: dict[Linear | Embedding, nn.Module] = {}
    for weight in table:
        module, name = model.get_submodule(weight.target), f"{weight.source}.weight"
        if not isinstance(module, Linear | Embedding) or (isinstance(module, Linear) and module.is_float32):
            continue
        if not checkpoint.names.isdisjoint(checkpoint.stored_names(name)):
            holder = model.get_submodule(weight.target.rpartition(".")[0])
            modules[module] = holder if isinstance(holder, ExpertLinear) else module
            found.setdefault(modules[module], set()).add(checkpoint.dtype(name))
    for module, holder in modules.items():
        dtype = next(iter(found[holder])) if len(found[holder]) == 1 else None
        if dtype == torch.float32 and narrowed is not None:
            dtype = narrowed
        if dtype is not None and module.weight is not None and can_hold(dtype):
            module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)


def working_bytes(checkpoint: Tensors, targets: Targets) -> int:
    """Return how much memory beside the parameters reading any one weight takes at most."""
    sizes = {name: math.prod(pieces[0].shape or pieces[0].target.shape) for name, pieces in targets}
    return max((checkpoint.working_bytes(name, size) for name, size in sizes.items()), default=0)


def keep_quantized(
    model: nn.Module,
    checkpoint: Tensors,
    table: Iterable[Weight],
    holds: Callable[[HeldFormat], bool],
) -> None:
    """Tells the products all of whose weights the checkpoint has as codes, or all in FP8, that they stay so, where that
    can be held: of experts all or none."""
    found: dict[Linear, list[HeldFormat | None]] = {}
    for weight in table:
        module = model.get_submodule(weight.target)
        if isinstance(module, Linear) and module.weight is not None and not module.is_float32:
            stored = checkpoint.quantized_format(f"{weight.source}.weight", module.weight.shape[1])
            found.setdefault(module, []).append(None if weight.is_transposed else stored)
    for module, stored_formats in found.items():
        known = [stored for stored in stored_formats if stored is not None]
        if len(known) == len(stored_formats) and len({stored.element for stored in known}) == 1:
            joined = HeldFormat.join(known)
            module.quantized_format = joined if holds(joined) else None
    for experts in model.modules():
        if isinstance(experts, ExpertLinear):
            kept = [linear.quantized_format for linear in experts.linears]
            is_one = len({stored and stored.element for stored in kept}) == 1
            for linear, stored in zip(experts.linears, kept, strict=True):  # slots are multiplied as they are
                linear.quantized_format = replace(stored, rounds_inputs=False) if stored and is_one else None


def fill_layers(table: Iterable[Weight], config: ModelConfig) -> Iterator[Weight]:
    """Repeats the entries that name `{layer}` for every layer that has such weights, and those that name `{expert}` for
    every expert."""
    for weight in table:
        for layer in range(config.num_layers if "{layer}" in weight.source else 1):
            if weight.layers != "all" and config.has_experts(layer) != (weight.layers == "experts"):
                continue
            num_experts = config.experts.num_experts if config.experts and "{expert}" in weight.source else 1
            for expert in range(num_experts):
                source, target = (name.format(layer=layer, expert=expert) for name in (weight.source, weight.target))
                yield replace(weight, source=source, target=target)


def targets_of(model: nn.Module, weight: Weight, shard: Shard) -> Iterator[tuple[str, list[Piece]]]:
    """Yield where this rank's part of each parameter of a module is in the checkpoint: its name there, and what is read
    of it and where that goes. `weight`: as `fill_layers` gives it."""
    module = model.get_submodule(weight.target)
    for kind, parameter in module.named_parameters(recurse=False):
        target = parameter.data
        if weight.part is not None:
            assert isinstance(module, Linear)
            target = target[module.rows(weight.part)]
        is_whole = shard.size == 1 or weight.split is None or weight.axis >= target.dim()
        pieces = [Piece(target)] if is_whole else list(_pieces(module, weight, target, shard))
        if weight.is_transposed and target.dim() == 2:
            pieces = [piece.transposed() for piece in pieces]
        yield f"{weight.source}.{kind}", pieces


def _pieces(module: nn.Module, weight: Weight, target: Tensor, shard: Shard) -> Iterator[Piece]:
    """This rank's part of each projection that the checkpoint's weight holds."""
    assert weight.split is not None
    if weight.axis == 1:
        assert isinstance(weight.split, Split)
        length, span = shard.length(weight.split), shard.span(weight.split)
        yield Piece(target, shape=(len(target), length), index=(slice(None), span))
        return
    num_projections = len(module.out_sizes) if isinstance(module, Linear) and weight.part is None else 1
    splits = weight.split if isinstance(weight.split, tuple) else (weight.split,) * num_projections
    spans, lengths = [shard.span(split) for split in splits], [shard.length(split) for split in splits]
    sizes = module.out_sizes if isinstance(module, Linear) and len(splits) == len(module.out_sizes) else (len(target),)
    first = 0
    for span, length, rows in zip(spans, lengths, target.split(list(sizes)), strict=True):
        start, stop = first + span.start, first + span.stop
        yield Piece(rows[: stop - start], shape=(sum(lengths), *target.shape[1:]), index=(slice(start, stop),))
        first += length
