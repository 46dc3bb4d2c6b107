"""The operations that a model is a list of, over weights that they name.

Operations name the buffers that they read and write: [T, width] for a step of T tokens. Executors carry them out in
their order: one call of C on a CPU, or a function for each on any device.
"""

from dataclasses import dataclass, fields
from typing import TypeAlias

from pagewire.common.network.config import Activation, QueryGrowth, RopeConfig
from pagewire.common.network.expert_routing import ExpertRouting


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers that belong to the places of a vector, or to heads."""

    name: str
    size: int
    is_float32: bool = False  # whatever the model computes in
    adds_one: bool = False  # to what is stored
    order: tuple[int, ...] = ()  # which of the checkpoint's each is; none: they are in that order

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return self.size


@dataclass(frozen=True, slots=True)
class Table:
    """The weight [num_rows, width] of which a row is taken for each index."""

    name: str
    num_rows: int
    width: int
    is_float32: bool = False

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Projection:
    """x W^T + b, where W [out_size, in_size] may be several projections of one input, one below the other; or one of
    each expert, all of one size."""

    name: str
    in_size: int
    out_sizes: tuple[int, ...]  # the rows of each
    has_bias: bool = False
    adds_bias: bool = True  # of several ranks whose outputs are summed one alone does
    num_experts: int = 0  # 0: it belongs to none
    is_float32: bool = False  # whatever the model computes in, and not quantised
    gives_float32: bool = False
    row_order: tuple[int, ...] = ()  # which row of the checkpoint's each is; none: they are in that order

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return max(1, self.num_experts) * sum(self.out_sizes) * (self.in_size + self.has_bias)


@dataclass(frozen=True, slots=True)
class Embed:
    """output = table[token] * factor + positions[position]."""

    output: str
    table: Table
    positions: Table | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    """input += update * factor."""

    input: str
    update: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Normalize:
    """input += update * factor, where there is one; then output = input / rms(input) * weight (Zhang and Sennrich,
    2019, https://arxiv.org/abs/1910.07467); or, centered, (input - mean) / deviation * weight + bias (Ba et al., 2016,
    https://arxiv.org/abs/1607.06450)."""

    input: str
    output: str
    weight: Vector
    eps: float
    update: str | None = None
    bias: Vector | None = None
    is_centered: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class NormalizeProjections:
    """output = input, queries, keys and values, of which all queries are normalized together, and all keys, of all
    ranks."""

    input: str
    output: str
    query_norm: Vector
    key_norm: Vector
    eps: float


@dataclass(frozen=True, slots=True)
class Multiply:
    """output = input W^T + b; gated, silu of its first half times its second."""

    input: str
    output: str
    projection: Projection
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Activate:
    """output = f(input); gated, that of the first half of the input times the second. The input may have several parts
    as wide as one another, each with such halves: the slots of a token.

    `clamped_swiglu` is gated: (up + 1) * gate * sigmoid(alpha * gate), of gates up to a limit, and ups up to it on both
    sides: that of gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925).
    """

    input: str
    output: str
    function: Activation
    is_gated: bool = False
    num_parts: int = 1
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteTopK:
    """The experts of each token and their weights, which others read as `routes`: see `route_tokens` in
    `kernels/experts.py`, whose words are used here."""

    input: str  # [T, num_experts], the router's logits
    output: str
    routing: ExpertRouting
    correction: Vector | None = None  # is added to scores for the routing alone


@dataclass(frozen=True, slots=True)
class MultiplyRouted:
    """output = x W^T + b of each slot, with the weight and bias of its expert; gated as `Multiply`."""

    input: str  # [T, in_size] of tokens, or [T, num_chosen * in_size] of slots
    output: str  # [T, num_chosen * out_size]
    routes: str
    projection: Projection
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class CombineExperts:
    """output = the slots of each token, times the weights of their experts, summed up in the order of the experts."""

    input: str  # [T, num_chosen * width]
    output: str  # [T, width]
    routes: str


@dataclass(frozen=True, slots=True)
class Gate:
    """output = input * sigmoid(gate)."""

    input: str
    gate: str  # [T, 1]
    output: str


@dataclass(frozen=True, slots=True)
class Clip:
    """output = input, bounded to -limit and limit; NaN stays."""

    input: str
    output: str
    limit: float


@dataclass(frozen=True, slots=True)
class QkNormRopeStore:
    """Of heads (queries, then keys, then values), normalizes those of queries and keys where there is a weight, turns
    them by their position where there is a rope, gives the queries, and stores keys and values."""

    input: str  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    output: str  # [T, num_heads * head_dim]
    layer: int
    num_heads: int
    head_dim: int
    num_positions: int  # that there are
    query_norm: Vector | None = None
    key_norm: Vector | None = None
    eps: float = 0.0
    rope: RopeConfig | None = None
    growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True)
class AttendPaged:
    """Queries to all that a layer has stored of their row (Kwon et al., 2023, https://arxiv.org/abs/2309.06180)."""

    input: str
    output: str
    layer: int
    sinks: Vector | None = None


@dataclass(frozen=True, slots=True)
class LmHead:
    """The input is the final hidden states, and the head's product of it, times a factor, the logits; with a softcap
    they are bounded to softcap * tanh(logit / softcap)."""

    input: str
    head: Projection
    factor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class AllReduce:
    """output = the sum of what all ranks have as input."""

    input: str
    output: str


Operation: TypeAlias = (
    Embed
    | Add
    | Normalize
    | NormalizeProjections
    | Multiply
    | Activate
    | RouteTopK
    | MultiplyRouted
    | CombineExperts
    | Gate
    | Clip
    | QkNormRopeStore
    | AttendPaged
    | LmHead
    | AllReduce
)
_READ = ("input", "update", "gate", "routes")


def weights_of(operations: tuple[Operation, ...]) -> dict[str, Vector | Table | Projection]:
    """Return all weights by their names, in the order in which they are first used."""
    values = (getattr(operation, field.name) for operation in operations for field in fields(operation))
    return {value.name: value for value in values if hasattr(value, "num_elements")}


def last_uses(operations: tuple[Operation, ...]) -> list[tuple[str, ...]]:
    """Return for each operation the buffers that none behind it reads before they are written anew."""
    needed: set[str] = set()
    released = []
    for operation in reversed(operations):
        read = {getattr(operation, name) for name in _READ if getattr(operation, name, None) is not None}
        written = {operation.output} if hasattr(operation, "output") else set()
        released.append(tuple(sorted(read - needed)))
        needed = (needed - written) | read
    return released[::-1]


def num_elements(operations: tuple[Operation, ...], *, is_tied: bool) -> int:
    """Return how many numbers a model holds: those of its weights, and cosines and sines of all positions. `is_tied`:
    the head is the embedding."""
    left_out = {operation.head.name for operation in operations if type(operation) is LmHead and is_tied}
    weights = sum(weight.num_elements for name, weight in weights_of(operations).items() if name not in left_out)
    turns = [operation for operation in operations if type(operation) is QkNormRopeStore]
    tables = {turn.rope: turn.num_positions * turn.head_dim for turn in turns if turn.rope is not None}
    return weights + 2 * sum(tables.values())
