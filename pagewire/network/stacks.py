"""Tensors of a checkpoint that contain the weights of all experts of a layer. Each expert's part gets a name of its
own.

`experts.gate_up_proj` may contain `experts.0.gate_proj.weight`, `experts.0.up_proj.weight` and so on. The other tensors
of these modules are in `experts.gate_up_proj_bias`, `_blocks` and `_scales`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagewire.network.checkpoint_files import CheckpointError, TensorHeader


@dataclass(frozen=True, slots=True)
class Stack:
    """The layout of a checkpoint tensor that stacks the weights of all experts of a layer. It says which projections of
    each expert the tensor contains, and in which order."""

    projections: tuple[str, ...]
    # Outputs of the projections are interleaved; otherwise the outputs of each projection are consecutive.
    is_interleaved: bool = False
    # Float weights are [experts, inputs, outputs]. None: the shapes decide, see `with_layout`.
    is_transposed: bool | None = False


# Stacks by name, and the stacks of transformers, which computes with stacked experts.
Stacks = Mapping[str, Stack]
STACKS = {"gate_up_proj": Stack(("gate_proj", "up_proj")), "down_proj": Stack(("down_proj",))}
# For each kind of an expert's tensor, the suffix of the stack's name, and the number of dimensions of the expert's
# tensor.
_KINDS = {"weight": ("", 2), "bias": ("_bias", 1), "blocks": ("_blocks", 3), "scales": ("_scales", 2)}
_PART = re.compile(rf"(.*)\.(\d+)\.(\w+)\.({'|'.join(_KINDS)})")


@dataclass(frozen=True, slots=True)
class StackedPart:
    """The weight of one projection of one expert, which is stored as a part of a stacked checkpoint tensor."""

    stack: str
    expert: int
    kind: str
    form: Stack
    number: int  # the index of the projection in `Stack.projections`

    @property
    def is_transposed(self) -> bool:
        """Whether the stacked tensor has the shape [experts, inputs, outputs] instead of [experts, outputs, inputs]."""
        return bool(self.form.is_transposed) and self.kind == "weight"

    @property
    def turns(self) -> slice:
        """The slice that selects the outputs of this projection from the outputs that `index` returns. If the
        projections are not interleaved, the slice selects everything."""
        return slice(self.number, None, self.num_turns) if self.form.is_interleaved else slice(None)

    @property
    def num_turns(self) -> int:
        """The number of projections whose outputs alternate in the stacked tensor, or 1 if the outputs are not
        interleaved."""
        return len(self.form.projections) if self.form.is_interleaved else 1

    def describe(self) -> str:
        """Return this part of the stacked tensor as a Python indexing expression, for error messages."""
        num_projections = len(self.form.projections)
        if num_projections > 1 and not self.form.is_interleaved:
            return f"{self.stack}[{self.expert}].chunk({num_projections})[{self.number}]"
        outputs = f"{self.number}::{num_projections}" if num_projections > 1 else ":"
        return f"{self.stack}[{self.expert}, {':, ' if self.is_transposed else ''}{outputs}]"

    def header(self, of_stack: TensorHeader) -> TensorHeader:
        """Return the tensor header that this part would have if it was stored as a separate tensor. `of_stack` is the
        header of the stacked tensor.

        Raises CheckpointError if the stacked tensor has too few or too many dimensions.
        """
        num_dims = 1 + _KINDS[self.kind][1]
        if len(of_stack.shape) != num_dims:
            raise CheckpointError(
                f"tensor {self.stack} in {of_stack.file} has shape {list(of_stack.shape)}, expected {num_dims} "
                "dimensions; the first is the number of experts"
            )
        shape = list(of_stack.shape[:0:-1] if self.is_transposed else of_stack.shape[1:])
        shape[0] = len(self._outputs(of_stack))
        return TensorHeader(of_stack.file, of_stack.dtype, tuple(shape))

    def index(self, of_stack: TensorHeader, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Convert an index into this part of a stacked tensor to an index into the stacked tensor. If projections are
        interleaved, the result covers all of them. `turns` then selects the outputs of this projection."""
        rows, *columns = index or (slice(None),)
        own = self._outputs(of_stack)
        start, stop, _ = rows.indices(len(own))
        if self.form.is_interleaved:
            outputs = slice(start * self.num_turns, stop * self.num_turns)
        else:
            outputs = slice(own.start + start, own.start + stop)
        expert = slice(self.expert, self.expert + 1)
        return (expert, *(columns or [slice(None)]), outputs) if self.is_transposed else (expert, outputs, *columns)

    def _outputs(self, of_stack: TensorHeader) -> range:
        """Return the range of this projection's outputs within the outputs of one expert in the stacked tensor."""
        num_outputs, num_projections = of_stack.shape[-1 if self.is_transposed else 1], len(self.form.projections)
        if self.form.is_interleaved:
            return range(self.number, num_outputs, num_projections)
        start, stop = (num_outputs * number // num_projections for number in (self.number, self.number + 1))
        return range(start, stop)


def with_layout(stacks: Stacks, headers: Mapping[str, TensorHeader]) -> Stacks:
    """Return the stacks of a checkpoint whose family has two layouts: published files are transposed, and files that
    transformers 5 writes are not. The shapes in `headers` decide, because a gate_up_proj has twice as many outputs as a
    down_proj has inputs. Stacks with a fixed layout are returned unchanged."""
    shapes = {name.rpartition(".")[2]: header.shape for name, header in headers.items()}  # equal in all layers
    match shapes.get("gate_up_proj"), shapes.get("down_proj"):
        case (_, outputs, width), (_, size, inputs):
            is_transposed = (outputs, width) != (2 * inputs, size)
        case _:
            is_transposed = True
    return {
        name: replace(stack, is_transposed=is_transposed) if stack.is_transposed is None else stack
        for name, stack in stacks.items()
    }


def find_part(stacks: Stacks, name: str) -> StackedPart | None:
    """Return the part of a stacked tensor that would contain the weight tensor `name` of one expert. Return None if
    `name` is no expert's tensor, or if no kind of stack contains it."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    experts, expert, projection, kind = match.groups()
    for stack, form in stacks.items():
        if projection in form.projections:
            source = f"{experts}.{stack}{_KINDS[kind][0]}"
            return StackedPart(source, int(expert), kind, form, form.projections.index(projection))
    return None


def unstacked_names(stacks: Stacks, name: str, header: TensorHeader) -> Iterator[str]:
    """Yield the tensor names of the individual expert weights that a stacked checkpoint tensor contains. For a tensor
    that is empty or not stacked, yield the tensor's own name."""
    experts, _, own = name.rpartition(".")
    for stack, form in stacks.items():
        for kind, (end, _) in _KINDS.items():
            if own == stack + end and header.shape and all(header.shape):
                numbers = range(header.shape[0])
                yield from (f"{experts}.{i}.{each}.{kind}" for i in numbers for each in form.projections)
                return
    yield name
