"""Tensors of a checkpoint that stack up what belongs to each expert of a layer, which has names of its own here.

`experts.down_proj` holds `experts.0.down_proj.weight` and so on; the other tensors of these modules are in
`experts.down_proj_bias`, `_blocks` and `_scales`. `experts.gate_up_proj` may hold one projection of each expert, or two
whose outputs take turns.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from worker_service.models.checkpoint_files import CONFIG_FILE, CheckpointError, TensorHeader


@dataclass(frozen=True, slots=True)
class Stack:
    """What a stack of weights holds of each expert."""

    projections: tuple[str, ...]  # whose outputs take turns
    is_transposed: bool = False  # it is [experts, inputs, outputs]


# By their names.
Stacks = Mapping[str, Stack]
# As transformers computes with them, and may write them.
STACKS: Stacks = {name: Stack((name,)) for name in ("gate_up_proj", "down_proj")}
# How the names of stacks end, by the kind of tensor of an expert, and the dimensions that the expert's has.
_KINDS = {"weight": ("", 2), "bias": ("_bias", 1), "blocks": ("_blocks", 3), "scales": ("_scales", 2)}
_PART = re.compile(rf"(.*)\.(\d+)\.(\w+)\.({'|'.join(_KINDS)})")


@dataclass(frozen=True, slots=True)
class StackedPart:
    """What a stack has of a projection of an expert."""

    stack: str
    expert: int
    kind: str
    turn: int  # of the projection, among those whose outputs take turns
    num_turns: int
    is_transposed: bool  # the stack is [experts, inputs, outputs]

    def describe(self) -> str:
        """The part as it would be written in Python."""
        outputs = f"{self.turn}::{self.num_turns}" if self.num_turns > 1 else ":"
        return f"{self.stack}[{self.expert}, {':, ' if self.is_transposed else ''}{outputs}]"

    def header(self, of_stack: TensorHeader) -> TensorHeader:
        """Return the header that this would have as a tensor of its own."""
        shape = list(of_stack.shape[:0:-1] if self.is_transposed else of_stack.shape[1:])
        shape[0] = len(range(self.turn, shape[0], self.num_turns))
        return TensorHeader(of_stack.file, of_stack.dtype, tuple(shape))

    def index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where the stack has a part of this tensor, in which all projections take turns."""
        rows, *columns = index or (slice(None),)
        start = (rows.start or 0) * self.num_turns
        turns = slice(start, None if rows.stop is None else rows.stop * self.num_turns)
        expert = slice(self.expert, self.expert + 1)
        return (expert, *(columns or [slice(None)]), turns) if self.is_transposed else (expert, turns, *columns)


def find_part(stacks: Stacks, name: str) -> StackedPart | None:
    """Return where a tensor of an expert would be; None: in no stack."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    experts, expert, projection, kind = match.groups()
    for name_of_stack, stack in stacks.items():
        if projection in stack.projections:
            source = f"{experts}.{name_of_stack}{_KINDS[kind][0]}"
            turn, num_turns = stack.projections.index(projection), len(stack.projections)
            return StackedPart(source, int(expert), kind, turn, num_turns, stack.is_transposed and kind == "weight")
    return None


def unstacked_names(stacks: Stacks, num_experts: int, headers: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield the names of what tensors have of each expert; their own, of what is no stack, or stands beside tensors of
    such names.

    Raises CheckpointError if a stack has another number of experts, or of dimensions.
    """
    for name, header in headers.items():
        found = _find_stack(stacks, name)
        if found is None:
            yield name
            continue
        experts, stack, kind = found
        names = [f"{experts}.{i}.{each}.{kind}" for i in range(num_experts) for each in stack.projections]
        if not headers.keys().isdisjoint(names):
            yield name
            continue
        _check_shape(name, header, num_experts, 1 + _KINDS[kind][1])
        yield from names


def _find_stack(stacks: Stacks, name: str) -> tuple[str, Stack, str] | None:
    """The module of a stack, the stack, and the kind of its tensor."""
    experts, _, own = name.rpartition(".")
    for name_of_stack, stack in stacks.items():
        for kind, (end, _) in _KINDS.items():
            if own == name_of_stack + end:
                return experts, stack, kind
    return None


def _check_shape(name: str, header: TensorHeader, num_experts: int, num_dims: int) -> None:
    shape = list(header.shape)
    if len(shape) != num_dims:
        expected = f"{num_dims} dimensions, of which the first counts experts"
    elif shape[0] != num_experts:
        expected = f"{[num_experts, *shape[1:]]} from {CONFIG_FILE}"
    else:
        return
    raise CheckpointError(f"tensor {name} in {header.file} has shape {shape}, expected {expected}")
