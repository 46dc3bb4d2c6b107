"""Functions that rewrite a list of operations: for one rank, for other weight names, and to fuse operations."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagewire.network.operations import (
    Activate,
    Add,
    AllReduce,
    AttentionHeads,
    CombineExperts,
    DeltaRule,
    Embed,
    Gate,
    Multiply,
    MultiplyRouted,
    Normalize,
    Operation,
    OperationList,
    Projection,
    Table,
    Vector,
    buffers_read,
    embedding_of,
    head_of,
    output_of,
    replaced,
)
from pagewire.network.rope import RopeConfig

# Patterns of names, and their replacements.
Renaming = tuple[tuple[str, str], ...]


def rewrite(operations: OperationList, change: Mapping[type, Callable[[Any], Any]]) -> OperationList:
    """Return a model's operations with some operands replaced, such as weights. `change` maps the type of an operand to
    a function from the old operand to the new operand."""
    return tuple(replaced(operation, change) for operation in operations)


def with_ropes(operations: OperationList, change: Callable[[RopeConfig], RopeConfig]) -> OperationList:
    """Return a model's operations with every configuration of rotary position embedding replaced by
    `change(configuration)`."""
    return rewrite(operations, {RopeConfig: change})


def renamed(operations: OperationList, renaming: Renaming) -> OperationList:
    """Return a model's operations with the weights renamed, for a checkpoint that uses other tensor names. `renaming`
    has regular expressions and their replacements, which are applied in order."""

    def name_of(name: str) -> str:
        for pattern, replacement in renaming:
            name = re.sub(pattern, replacement, name)
        return name

    def project(projection: Projection) -> Projection:
        return replace(projection, parts=tuple(replace(part, name=name_of(part.name)) for part in projection.parts))

    def rename(weight: Vector | Table) -> Vector | Table:
        return replace(weight, name=name_of(weight.name))

    return rewrite(operations, {Vector: rename, Table: rename, Projection: project}) if renaming else operations


def tied(operations: OperationList) -> OperationList:
    """Return a model's operations with tied embeddings: the LM head uses the weight of the token embedding."""
    head, name = head_of(operations), embedding_of(operations).name
    own = replace(head, parts=(replace(head.parts[0], name=name),))
    return rewrite(operations, {Projection: lambda each: own if each == head else each})


def with_rows_of(operations: OperationList, projection: Projection) -> OperationList:
    """Return a model's operations, changed such that the token embedding reads the rows of the weight of `projection`.
    The projection may be the LM head, so that both share one weight in memory."""
    both = replace(projection, has_row_lookup=True)
    changed = rewrite(operations, {Projection: lambda each: both if each == projection else each})
    return tuple(replace(each, table=both) if type(each) is Embed else each for each in changed)


def cut(operations: OperationList, rank: int, num_ranks: int) -> OperationList:
    """Split a model for tensor parallelism, and return the operations of one rank. The model is split as in Megatron-LM
    (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053): a rank computes some outputs, or uses some inputs, of each
    projection. Partial results are summed over the ranks before they are used. Embeddings, norms and routers are not
    split. The state of a sequence on a rank is the part for the rank's channels and heads.

    Raises ValueError if the model cannot be split among `num_ranks` ranks.
    """
    if num_ranks == 1:
        return operations

    def project(projection: Projection) -> Projection:
        parts = tuple(replace(part, rows=part.rows.of_rank(rank, num_ranks)) for part in projection.parts)
        columns = projection.columns.of_rank(rank, num_ranks)
        return replace(projection, parts=parts, columns=columns, adds_bias=rank == 0 or columns == projection.columns)

    def share(vector: Vector) -> Vector:
        sections = tuple(section.of_rank(rank, num_ranks) for section in vector.sections)
        return replace(vector, values=vector.values.of_rank(rank, num_ranks), sections=sections)

    def heads(heads: AttentionHeads) -> AttentionHeads:
        return heads.of_rank(rank, num_ranks)

    own = rewrite(operations, {Vector: share, Projection: project, AttentionHeads: heads})
    own = tuple(each.of_rank(num_ranks) if type(each) is DeltaRule else each for each in own)
    return tuple(_with_all_reduces(own))


def _with_all_reduces(operations: OperationList) -> Iterator[Operation]:
    """Yield the operations of one tensor-parallel rank, with an AllReduce for each partial result. An AllReduce sums
    the partial results of all ranks. It comes directly before the first operation that needs the complete sum.
    Operations in `_SUMS` also work on partial results."""
    partial: set[str | None] = set()
    for operation in operations:
        parts = buffers_read(operation) & partial
        is_sum = parts == {getattr(operation, name) for name in _SUMS.get(type(operation), ())} != set()
        if not is_sum:
            yield from (AllReduce(name, name) for name in sorted(parts))
            partial -= parts
        if is_sum or _has_some_inputs(operation):
            partial.add(output_of(operation))
        yield operation


# Inputs for which an operation commutes with the sum over ranks: if exactly these are partial, so is its result.
_SUMS: dict[type, tuple[str, ...]] = {Add: ("input", "update"), CombineExperts: ("input",), Gate: ("input",)}


def _has_some_inputs(operation: Any) -> bool:
    """Return whether an operation on this tensor-parallel rank multiplies only a part of the inputs of its linear
    layer. The output of such an operation is partial and must be summed over the ranks."""
    return type(operation) in (Multiply, MultiplyRouted) and not operation.projection.columns.is_whole


def fuse_updates(operations: OperationList) -> Iterator[Operation]:
    """Fuse each `Add`, which adds an update to the hidden states, with a norm of the same buffer directly after it. The
    fused norm operation adds the update itself."""
    before: Operation | None = None
    for operation in operations:
        if isinstance(before, Add) and type(operation) is Normalize and operation.input == before.input:
            operation, before = replace(operation, update=before.update, factor=before.factor), None
        if before is not None:
            yield before
        before = operation
    if before is not None:
        yield before


def gate_projections(operations: Sequence[Operation], can_gate: Callable[[Projection], bool]) -> Iterator[Operation]:
    """Fuse each linear layer with a gated silu activation directly after it, if `can_gate` returns True for the
    projection. The fused operation multiplies silu of the first half of the projection's outputs by the second half."""
    left = iter([*operations, None])
    operation = next(left)
    while operation is not None:
        following = next(left)
        gated = _fuse_with_gate(operation, following, can_gate)
        yield gated or operation
        operation = following if gated is None else next(left)


def _fuse_with_gate(
    operation: Any, following: Operation | None, can_gate: Callable[[Projection], bool]
) -> Operation | None:
    """Return one operation that fuses a linear layer with the gated silu activation after it. Return None if the two
    operations cannot be fused."""
    if type(following) is not Activate or following.function != "silu" or not following.is_gated:
        return None
    if type(operation) not in (Multiply, MultiplyRouted) or not can_gate(operation.projection):
        return None
    gated: Operation = replace(operation, output=following.output, is_gated=True)
    return gated
