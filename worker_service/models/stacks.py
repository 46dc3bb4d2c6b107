"""Tensors of a checkpoint that stack up what belongs to each expert of a layer, which has names of its own here.

`experts.gate_up_proj` may hold `experts.0.gate_proj.weight`, `experts.0.up_proj.weight` and so on; the other tensors of
these modules are in `experts.gate_up_proj_bias`, `_blocks` and `_scales`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from worker_service.models.checkpoint_files import CheckpointError, TensorHeader

# The projections of an expert whose outputs take turns in a stack, by the name of that.
Stacks = Mapping[str, tuple[str, ...]]
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

    @property
    def is_transposed(self) -> bool:
        """Whether the stack is [experts, inputs, outputs]."""
        return self.kind == "weight"

    def describe(self) -> str:
        """The part as it would be written in Python."""
        outputs = f"{self.turn}::{self.num_turns}" if self.num_turns > 1 else ":"
        return f"{self.stack}[{self.expert}, {':, ' if self.is_transposed else ''}{outputs}]"

    def header(self, of_stack: TensorHeader) -> TensorHeader:
        """Return the header that this would have as a tensor of its own.

        Raises CheckpointError if the stack has too few or too many dimensions.
        """
        num_dims = 1 + _KINDS[self.kind][1]
        if len(of_stack.shape) != num_dims:
            raise CheckpointError(
                f"tensor {self.stack} in {of_stack.file} has shape {list(of_stack.shape)}, expected {num_dims} "
                "dimensions, of which the first counts experts"
            )
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
    for stack, projections in stacks.items():
        if projection in projections:
            source = f"{experts}.{stack}{_KINDS[kind][0]}"
            return StackedPart(source, int(expert), kind, projections.index(projection), len(projections))
    return None


def unstacked_names(stacks: Stacks, name: str, header: TensorHeader) -> Iterator[str]:
    """Yield the names of what a tensor has of each expert; its own, if it is no stack."""
    experts, _, own = name.rpartition(".")
    for stack, projections in stacks.items():
        for kind, (end, _) in _KINDS.items():
            if own == stack + end:
                num_experts = header.shape[0] if header.shape else 0
                yield from (f"{experts}.{i}.{each}.{kind}" for i in range(num_experts) for each in projections)
                return
    yield name
