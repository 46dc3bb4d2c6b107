"""Lists of operations made of others: what a rank has, what a checkpoint calls weights, what is computed in one go."""

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
    Embed,
    Gate,
    Listing,
    Multiply,
    MultiplyRouted,
    Normalize,
    Operation,
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

# Patterns of names, and what stands in their place.
Renaming = tuple[tuple[str, str], ...]


def rewrite(operations: Listing, change: Mapping[type, Callable[[Any], Any]]) -> Listing:
    """Change the operands of all operations by their types."""
    return tuple(replaced(operation, change) for operation in operations)


def with_ropes(operations: Listing, change: Callable[[RopeConfig], RopeConfig]) -> Listing:
    """Turn heads in other ways."""
    return rewrite(operations, {RopeConfig: change})


def renamed(operations: Listing, renaming: Renaming) -> Listing:
    """Give weights the names that another checkpoint has for them."""

    def name_of(name: str) -> str:
        for pattern, replacement in renaming:
            name = re.sub(pattern, replacement, name)
        return name

    def project(projection: Projection) -> Projection:
        return replace(projection, parts=tuple(replace(part, name=name_of(part.name)) for part in projection.parts))

    def rename(weight: Vector | Table) -> Vector | Table:
        return replace(weight, name=name_of(weight.name))

    return rewrite(operations, {Vector: rename, Table: rename, Projection: project}) if renaming else operations


def tied(operations: Listing) -> Listing:
    """Let the head have the weight of the embedding."""
    head, name = head_of(operations), embedding_of(operations).name
    own = replace(head, parts=(replace(head.parts[0], name=name),))
    return rewrite(operations, {Projection: lambda each: own if each == head else each})


def with_rows_of(operations: Listing, projection: Projection) -> Listing:
    """Take the rows of tokens from a projection, which may be the head."""
    both = replace(projection, gives_rows=True)
    changed = rewrite(operations, {Projection: lambda each: both if each == projection else each})
    return tuple(replace(each, table=both) if type(each) is Embed else each for each in changed)


def cut(operations: Listing, rank: int, num_ranks: int) -> Listing:
    """Return what one of several ranks computes, as in Megatron-LM (Shoeybi et al., 2019,
    https://arxiv.org/abs/1909.08053): of projections it has some outputs, or some inputs, and then ranks sum up what
    came of these before it is used. Embeddings, norms and routers are whole.

    Raises ValueError if the model cannot be shared out among so many.
    """
    if num_ranks == 1:
        return operations

    def project(projection: Projection) -> Projection:
        parts = tuple(replace(part, rows=part.rows.of_rank(rank, num_ranks)) for part in projection.parts)
        columns = projection.columns.of_rank(rank, num_ranks)
        return replace(projection, parts=parts, columns=columns, adds_bias=rank == 0 or columns == projection.columns)

    def share(vector: Vector) -> Vector:
        return replace(vector, values=vector.values.of_rank(rank, num_ranks))

    def heads(heads: AttentionHeads) -> AttentionHeads:
        return heads.of_rank(rank, num_ranks)

    own = rewrite(operations, {Vector: share, Projection: project, AttentionHeads: heads})
    return tuple(_summed(own))


def _summed(operations: Listing) -> Iterator[Operation]:
    """Has ranks sum up what each has a part of, before anything else than a sum is made of it."""
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


# What operations read that give a part of what they gave of the whole, where each of these is a part.
_SUMS: dict[type, tuple[str, ...]] = {Add: ("input", "update"), CombineExperts: ("input",), Gate: ("input",)}


def _has_some_inputs(operation: Any) -> bool:
    """Whether a rank multiplies a part of the inputs, and others the rest."""
    return type(operation) in (Multiply, MultiplyRouted) and not operation.projection.columns.is_whole


def fuse_updates(operations: Listing) -> Iterator[Operation]:
    """Let norms add to what they read what was to be added to it just before."""
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
    """Have projections compute the silu by which half of their outputs gates the other, where they can."""
    left = iter([*operations, None])
    operation = next(left)
    while operation is not None:
        following = next(left)
        gated = _gated(operation, following, can_gate)
        yield gated or operation
        operation = following if gated is None else next(left)


def _gated(operation: Any, following: Operation | None, can_gate: Callable[[Projection], bool]) -> Operation | None:
    """Both operations as one; None: they stay two."""
    if type(following) is not Activate or following.function != "silu" or not following.is_gated:
        return None
    if type(operation) not in (Multiply, MultiplyRouted) or not can_gate(operation.projection):
        return None
    gated: Operation = replace(operation, output=following.output, is_gated=True)
    return gated
