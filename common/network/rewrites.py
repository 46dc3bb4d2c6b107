"""Lists of operations made of others: what processors compute in one go."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pagewire.common.network.operations import (
    Activate,
    Multiply,
    MultiplyRouted,
    Operation,
    Projection,
)


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
