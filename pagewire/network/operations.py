"""The operations that a model is a list of, over weights that they name as checkpoints do.

Operations name the buffers that they read and write: [T, width] for a step of T tokens. Executors carry them out in
their order: one call of C on a CPU, or a function for each on any device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.rope import QueryGrowth, RopeConfig

Activation: TypeAlias = str  # a name of `_ACTIVATIONS` in `worker_service/models/functions.py`, and of C's FUNCTION_


@dataclass(frozen=True, slots=True)
class Share:
    """Places of a dimension of a tensor: `size` of them, from `first` on, of as many as `whole` says."""

    size: int
    whole: int
    first: int = 0
    unit: int = 0  # places that stay together where ranks share them out; 0: each rank has all
    counted: str = ""  # what units are
    is_repeated: bool = False  # of fewer units than ranks several have the same; else ranks must divide them
    is_padded: bool = False  # all ranks have equally many, of which the last of them may stand for nothing

    @staticmethod
    def of(size: int, unit: int = 0, counted: str = "", **how: bool) -> "Share":
        """All of a dimension."""
        return Share(size, size, 0, unit, counted, **how)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the dimension, in its order."""
        return self.size == self.whole

    @property
    def stored(self) -> slice:
        """Which places of the tensor these are, as far as they are there."""
        return slice(min(self.first, self.whole), min(self.first + self.size, self.whole))

    def of_rank(self, rank: int, num_ranks: int) -> "Share":
        """Return what one rank has. Raises ValueError if so many cannot share it out."""
        if not self.unit or num_ranks == 1:
            return self
        num_units = self.size // self.unit
        per_rank = -(-num_units // num_ranks)
        if num_units % num_ranks and not self.is_padded:
            if not self.is_repeated or num_ranks % num_units:
                need = f"divide the {num_units} {self.counted}{', or be a multiple of them' * self.is_repeated}"
                raise ValueError(f"--tensor-parallel-size is {num_ranks}; for this model it must {need}")
            return replace(self, size=self.unit, first=self.first + rank * num_units // num_ranks * self.unit)
        return replace(self, size=per_rank * self.unit, first=self.first + rank * per_rank * self.unit)


@dataclass(frozen=True, slots=True)
class Vector:
    """Numbers that belong to the places of a vector, or to heads."""

    name: str
    values: Share
    is_float32: bool = False  # whatever the model computes in
    adds_one: bool = False  # to what is stored
    head_order: tuple[int, ...] = ()  # which of the values of a checkpoint's head each is; none: they are in that order

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return self.values.size

    @property
    def order(self) -> tuple[int, ...]:
        """Which of the checkpoint's each is; none: they are in that order."""
        return _repeated(self.head_order, self.num_elements)


@dataclass(frozen=True, slots=True)
class Table:
    """The weight [num_rows, width] of which a row is taken for each index."""

    name: str
    num_rows: int
    width: int

    @property
    def modules(self) -> tuple[str, ...]:
        """Its name alone, as that of a projection of one part."""
        return (self.name,)

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the weight, and of the bias, of a module of the checkpoint."""

    name: str
    rows: Share


@dataclass(frozen=True, slots=True)
class Projection:
    """x W^T + b, where W [out_size, in_size] may be several projections of one input, one below the other; or one of
    each expert, all of one size, in whose names `{expert}` counts from 0."""

    parts: tuple[Part, ...]  # one below the other
    columns: Share
    has_bias: bool = False
    adds_bias: bool = True  # of several ranks whose outputs are summed one alone does
    is_transposed: bool = False  # the checkpoint holds [in, out]
    num_experts: int = 0  # 0: it belongs to none
    is_float32: bool = False  # whatever the model computes in, and not quantised
    gives_float32: bool = False
    gives_rows: bool = False  # by their indexes too
    heads: "HeadRows | None" = None  # queries, keys and values; None: rows are in the checkpoint's order

    @property
    def name(self) -> str:
        """That of its first part."""
        return self.parts[0].name

    @property
    def in_size(self) -> int:
        """How many inputs it has."""
        return self.columns.size

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """The rows of each part."""
        return tuple(part.rows.size for part in self.parts)

    @property
    def num_elements(self) -> int:
        """What is stored of it."""
        return max(1, self.num_experts) * sum(self.out_sizes) * (self.in_size + self.has_bias)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its parts, each once, of all experts."""
        experts = range(max(1, self.num_experts))
        return tuple(dict.fromkeys(part.name.format(expert=expert) for expert in experts for part in self.parts))

    @property
    def row_order(self) -> tuple[int, ...]:
        """Which row of the checkpoint's each is; none: they are in that order."""
        return () if self.heads is None else self.heads.row_order(self.out_sizes)

    def of_expert(self, expert: int) -> "Projection":
        """Return that of one expert alone."""
        parts = tuple(replace(part, name=part.name.format(expert=expert)) for part in self.parts)
        return replace(self, parts=parts, num_experts=0)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """In which order a checkpoint has the rows of queries, keys and values."""

    head_dim: int
    order: tuple[int, ...] = ()  # which of the values of its heads, of queries and keys, each is; none: in that order
    are_by_head: bool = False  # the rows of each head's query, key and value are together

    def row_order(self, out_sizes: tuple[int, ...]) -> tuple[int, ...]:
        """See `Projection`."""
        if not self.order and not self.are_by_head:
            return ()
        size, num_rows = self.head_dim, sum(out_sizes)
        num_turned = num_rows // 3 * 2 if self.are_by_head else sum(out_sizes[:2])
        rows = [*_repeated(self.order or tuple(range(size)), num_turned), *range(num_turned, num_rows)]
        if self.are_by_head:
            num_heads = num_rows // 3 // size
            rows = [(row // size % num_heads * 3 + row // size // num_heads) * size + row % size for row in rows]
        return tuple(rows)


Weight: TypeAlias = Vector | Table | Projection


def _repeated(order: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The order of the values of several heads."""
    return tuple(first + value for first in range(0, size, max(1, len(order))) for value in order)


@dataclass(frozen=True, slots=True)
class Embed:
    """output = table[token] * factor + positions[position]."""

    output: str
    table: Table | Projection  # the latter where rows are taken of what a product has too, or of codes
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
class AttentionHeads:
    """Heads of queries, and those of keys and values that they share (Ainslie et al., 2023,
    https://arxiv.org/abs/2305.13245), and how they score: see `Scoring` of `pagewire.kernels.arguments`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    window: int = 0  # positions a query attends to, its own included; 0: all up to its own
    softcap: float = 0.0  # scores are bounded to softcap * tanh(score / softcap); 0: they are not
    alibi_slopes: tuple[float, ...] = ()  # [num_heads]; none: scores fall by no distance

    def of_rank(self, rank: int, num_ranks: int) -> "AttentionHeads":
        """Return what one rank has. Where there are more ranks than KV heads, several have the same one."""
        share = self.num_heads // num_ranks
        slopes = self.alibi_slopes[rank * share : (rank + 1) * share]
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        return replace(self, num_heads=share, num_kv_heads=num_kv_heads, alibi_slopes=slopes)


@dataclass(frozen=True, slots=True)
class QkNormRopeStore:
    """Of heads (queries, then keys, then values), normalizes those of queries and keys where there is a weight, turns
    them by their position where there is a rope, gives the queries, and stores keys and values."""

    input: str  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    output: str  # [T, num_heads * head_dim]
    layer: int
    heads: AttentionHeads
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
    heads: AttentionHeads
    sinks: Vector | None = None  # [num_heads], see `Scoring.sinks`


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
Listing: TypeAlias = tuple[Operation, ...]


def weights_of(operations: Listing) -> tuple[Weight, ...]:
    """Return all weights, in the order in which they are first used."""
    values = (getattr(operation, field.name) for operation in operations for field in fields(operation))
    return tuple(dict.fromkeys(value for value in values if type(value) in (Vector, Table, Projection)))


def head_of(operations: Listing) -> Projection:
    """Return what makes logits of hidden states."""
    (head,) = [operation.head for operation in operations if type(operation) is LmHead]
    return head


def embedding_of(operations: Listing) -> Table | Projection:
    """Return what makes hidden states of tokens."""
    (table,) = [operation.table for operation in operations if type(operation) is Embed]
    return table


def replaced(operation: Any, change: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Return the operation in which each operand is what `change` has for its type, where it has that."""
    operands = {field.name: getattr(operation, field.name) for field in fields(operation)}
    changed = {name: change[type(value)](value) for name, value in operands.items() if type(value) in change}
    return replace(operation, **changed) if changed else operation


def buffers_read(operation: Operation) -> set[str]:
    """Return the names of what an operation reads."""
    return {getattr(operation, name) for name in _READ if getattr(operation, name, None) is not None}


def output_of(operation: Operation) -> str | None:
    """Return the name of what an operation writes; of an `Add` that is its input. None: nothing, which is the head."""
    return operation.input if type(operation) is Add else getattr(operation, "output", None)


def last_uses(operations: Listing) -> list[tuple[str, ...]]:
    """Return for each operation the buffers that none behind it reads before they are written anew."""
    needed: set[str] = set()
    released = []
    for operation in reversed(operations):
        read, written = buffers_read(operation), {getattr(operation, "output", None)}
        released.append(tuple(sorted(read - needed)))
        needed = (needed - written) | read
    return released[::-1]


def num_elements(operations: Listing) -> int:
    """Return how many numbers a model holds: those of its weights, and cosines and sines of all positions. An embedding
    that is the head too, all of it, counts once."""
    weights = {(weight.name, weight.num_elements) for weight in weights_of(operations)}
    turns = [operation for operation in operations if type(operation) is QkNormRopeStore]
    tables = {turn.rope: turn.num_positions * turn.heads.head_dim for turn in turns if turn.rope is not None}
    return sum(number for _, number in weights) + 2 * sum(tables.values())
