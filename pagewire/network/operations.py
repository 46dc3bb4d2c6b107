"""The operations of which a model is a list. They refer to weights by the names in the checkpoint.

Operations name the buffers that they read and write, which are [T, width] for a step of T tokens. An executor runs the
operations in order: with one call of C code on a CPU, or with one Python function per operation on any device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.rope import QueryScaling, RopeConfig

# A key of `_ACTIVATIONS` in `worker_service/models/functions.py`, and a FUNCTION_ constant in C.
Activation: TypeAlias = str


@dataclass(frozen=True, slots=True)
class Share:
    """The range of indices of one dimension of a weight tensor that a tensor-parallel rank stores. The range has `size`
    indices and begins at `first`, in a dimension of length `whole`."""

    size: int
    whole: int
    first: int = 0
    unit: int = 0  # indices that must stay together when ranks split the range; 0: each rank has the whole range
    counted: str = ""  # name of the units, for error messages
    # If there are fewer units than ranks, several ranks have the same unit. If False, the number of ranks must divide
    # the number of units.
    is_repeated: bool = False
    is_padded: bool = False  # all ranks have ranges of equal size, and the last ranks' ranges may extend past `whole`

    @staticmethod
    def of(size: int, unit: int = 0, counted: str = "", **how: bool) -> "Share":
        """Return the range of all `size` indices of a tensor dimension."""
        return Share(size, size, 0, unit, counted, **how)

    @property
    def is_whole(self) -> bool:
        """Whether the range covers the whole dimension of the tensor."""
        return self.size == self.whole

    @property
    def stored(self) -> slice:
        """The range as a slice of the tensor in the checkpoint. Indices past `whole`, which are only padding, are left
        out."""
        return slice(min(self.first, self.whole), min(self.first + self.size, self.whole))

    def of_rank(self, rank: int, num_ranks: int) -> "Share":
        """Return the part of this range that one tensor-parallel rank stores. Raises ValueError if the units of the
        range, such as attention heads, cannot be split among `num_ranks` ranks."""
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
    """A one-dimensional weight of the model, such as the weight of a norm, a bias, or a vector with one number per
    head."""

    name: str
    values: Share
    is_float32: bool = False  # in any case, independent of the model's dtype
    adds_one: bool = False  # 1 is added to the stored values
    is_stored: bool = True  # otherwise the checkpoint has no such tensor, and all values are 1
    # The checkpoint stores a matrix with rows of this size, or one tensor per head of this size if the name contains
    # `{head}`; 0: a plain vector.
    row_size: int = 0
    # For each value of a head, its index in the checkpoint's head; empty: the same order.
    head_order: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()  # the checkpoint stores each value as a tensor of its own, `name`.part
    is_log: bool = False  # the checkpoint stores log(-value) for each value
    # The ranges of `values` that are split among ranks one by one, in their order; empty: `values` is split.
    sections: tuple[Share, ...] = ()

    @property
    def num_elements(self) -> int:
        """The number of stored values of this weight."""
        return sum(share.size for share in self.shares)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The ranges of the checkpoint's tensor that this weight consists of, in their order."""
        return self.sections or (self.values,)

    @property
    def order(self) -> tuple[int, ...]:
        """The index in the checkpoint's vector for each value of this weight. The tuple is empty if the checkpoint
        stores the values in the same order."""
        return _repeat_order(self.head_order, self.num_elements)


@dataclass(frozen=True, slots=True)
class Table:
    """A weight matrix [num_rows, width] whose rows are looked up by index, such as a token embedding."""

    name: str
    num_rows: int
    width: int
    num_skipped: int = 0  # rows at the beginning of the checkpoint's tensor that are left out

    @property
    def modules(self) -> tuple[str, ...]:
        """The name of the checkpoint module that stores this table, as a tuple of one name. `Projection.modules` has
        the same form."""
        return (self.name,)

    @property
    def num_elements(self) -> int:
        """The number of stored values of this weight."""
        return self.num_rows * self.width


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint module that provides rows of a `Projection`. The fields are the module's name, and the range of
    the module's rows to use.

    Some modules store the rows of several projections in turn, for example query rows and gate rows of each head. Then
    `period` is the number of rows of all of them for one unit of `rows`. This part's rows of the unit begin at
    `offset`. `rows` counts only the rows of this part."""

    name: str
    rows: Share
    period: int = 0  # 0: the module stores no other rows in between
    offset: int = 0

    @property
    def stored_rows(self) -> Share:
        """The range of the module's rows that contains the rows of this part."""
        if not self.period:
            return self.rows
        size, whole, first = (
            rows // self.rows.unit * self.period for rows in (self.rows.size, self.rows.whole, self.rows.first)
        )
        return replace(self.rows, size=size, whole=whole, first=first, unit=self.period)

    @property
    def row_indexes(self) -> tuple[int, ...]:
        """The indexes of this part's rows in `stored_rows`. The tuple is empty if it has all of these rows."""
        if not self.period:
            return ()
        firsts = range(self.offset, self.stored_rows.size, self.period)
        return tuple(row for first in firsts for row in range(first, first + self.rows.unit))


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The order in which a checkpoint stores the rows of merged projections, such as queries, keys and values. It is
    needed for checkpoints that interleave the values of a head, or the rows of the merged projections."""

    # For each value of a query or key head, its index in the checkpoint's head; empty: the same order.
    head_order: tuple[int, ...] = ()
    # The numbers of rows of each projection that are stored together, as one of many equal units. For example, a unit
    # has the query, key and value rows of one KV head. Empty: all rows of a projection are stored together.
    unit: tuple[int, ...] = ()

    def row_order(self, out_sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the checkpoint for each row of the merged projections. The tuple is empty if the
        checkpoint stores the rows in the same order. `out_sizes` has the number of rows of each projection, or of all
        together if they are stored in units."""
        if not self.head_order and not self.unit:
            return ()
        unit, num_rows = self.unit or out_sizes, sum(out_sizes)
        firsts, bounds = range(0, num_rows, sum(unit)), pairwise(accumulate(unit, initial=0))
        rows = [first + row for start, end in bounds for first in firsts for row in range(start, end)]
        num_turned = sum(unit[:2]) * len(firsts)
        turned = _repeat_order(self.head_order or (0,), num_turned)
        return tuple(rows[row] for row in (*turned, *range(num_turned, num_rows)))


@dataclass(frozen=True, slots=True)
class Projection:
    """The weights of a linear projection x W^T + b, with W of shape [out_size, in_size]. W may be the concatenation of
    several checkpoint modules along the output dimension, such as the query, key and value projections. If
    `num_experts` is set, there is one such projection per expert, all of the same size. The module names then contain
    `{expert}` in place of the number of the expert, from 0."""

    parts: tuple[Part, ...]  # one below the other
    columns: Share
    has_bias: bool = False
    adds_bias: bool = True  # with several ranks whose outputs are summed, only one rank adds the bias
    is_transposed: bool = False  # the checkpoint stores [in, out]
    num_experts: int = 0  # 0: the projection belongs to no expert
    is_float32: bool = False  # in any case, independent of the model's dtype, and never quantised
    gives_float32: bool = False
    has_row_lookup: bool = False  # single rows of the weight can be read by index, too
    stored: StoredRows = StoredRows()

    @property
    def name(self) -> str:
        """The name of the first checkpoint module. If the module's first rows belong to another projection, the
        index of this projection's first row is appended."""
        first = self.parts[0]
        return f"{first.name}_{first.offset}" if first.offset else first.name

    @property
    def in_size(self) -> int:
        """The number of inputs of the projection."""
        return self.columns.size

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """The number of rows (outputs) of each checkpoint module of the projection."""
        return tuple(part.rows.size for part in self.parts)

    @property
    def num_elements(self) -> int:
        """The number of stored values of this projection, including biases and all experts."""
        return max(1, self.num_experts) * sum(self.out_sizes) * (self.in_size + self.has_bias)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all checkpoint modules that this projection consists of, without duplicates. The names of all
        experts are included."""
        experts = range(max(1, self.num_experts))
        return tuple(dict.fromkeys(part.name.format(expert=expert) for expert in experts for part in self.parts))

    @property
    def row_order(self) -> tuple[int, ...]:
        """The index in the checkpoint for each row of the projection's weight. The tuple is empty if the checkpoint
        stores the rows in the same order."""
        return self.stored.row_order(self.out_sizes)

    def of_expert(self, expert: int) -> "Projection":
        """Return the projection of a single expert, from the projection of all experts of a layer."""
        parts = tuple(replace(part, name=part.name.format(expert=expert)) for part in self.parts)
        return replace(self, parts=parts, num_experts=0)


Weight: TypeAlias = Vector | Table | Projection


def _repeat_order(order: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Extend an order of the values within one attention head to several heads. `order` has, for each value of a head,
    its index in the checkpoint's head. Return the same for a vector of length `size` that contains the values of
    several heads."""
    return tuple(first + value for first in range(0, size, max(1, len(order))) for value in order)


@dataclass(frozen=True, slots=True)
class Embed:
    """The operation that looks up token embeddings: output = table[token] * factor + positions[position]."""

    output: str
    table: Table | Projection  # a projection if the head's weight, or a quantised weight, provides the rows
    positions: Table | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    """The operation that adds an update to a buffer in place: input += update * factor."""

    input: str
    update: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Normalize:
    """The operation of a normalization layer. An RMS norm computes output = input / rms(input) * weight (Zhang and
    Sennrich, 2019, https://arxiv.org/abs/1910.07467). If `is_centered`, this is a layer norm: output = (input - mean) /
    deviation * weight + bias (Ba et al., 2016, https://arxiv.org/abs/1607.06450). If `update` names a buffer, the
    operation first computes input += update * factor."""

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
    """The operation that normalizes the attention queries and keys, and copies the values unchanged. One RMS norm
    covers the queries of all heads together, and another covers the keys of all heads. With tensor parallelism, each
    norm covers the heads of all ranks. If `head_dim` is set, each head has a layer norm with its own weight instead."""

    input: str
    output: str
    query_norm: Vector
    key_norm: Vector
    eps: float
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Multiply:
    """The operation of a linear layer: output = input W^T + b. If `is_gated`, output = silu(first half) * second half
    of this result."""

    input: str
    output: str
    projection: Projection
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Activate:
    """The operation of an activation function: output = f(input). If `is_gated`, output = f(first half of the input) *
    second half. The input of a token may consist of `num_parts` parts of equal width, one for each expert chosen for
    the token. If `is_gated`, each part has its own two halves.

    The function `clamped_swiglu` (gpt-oss, OpenAI, 2025, https://arxiv.org/abs/2508.10925) is gated: (up + 1) * gate *
    sigmoid(alpha * gate). The gate is first clamped to at most `limit`, and `up` to the range from -limit to limit.

    The function `xielu` (Huang and Schlag, 2024, https://arxiv.org/abs/2411.13010) is not gated. Its `parameters` are
    alpha_p, alpha_n, beta and eps. It is softplus(alpha_p) * x^2 + beta * x for positive x. For other x, it is (beta +
    softplus(alpha_n)) * (exp(min(x, eps)) - 1 - x) + beta * x.
    """

    input: str
    output: str
    function: Activation
    is_gated: bool = False
    num_parts: int = 1
    alpha: float = 1.0
    limit: float = 0.0
    parameters: Vector | None = None


@dataclass(frozen=True, slots=True)
class RouteTopK:
    """The operation of a mixture-of-experts router: it chooses the top-k experts of each token, and their weights.
    Later operations read the result as their `routes`. The terms are defined by `route_tokens` in
    `kernels/experts.py`."""

    input: str  # [T, num_experts], the router's logits
    output: str
    routing: ExpertRouting
    correction: Vector | None = None  # added to the scores for the choice of experts only


@dataclass(frozen=True, slots=True)
class MultiplyRouted:
    """The operation of the experts' linear layers. It computes output = x W^T + b for each slot (a pair of a token and
    an expert chosen for the token), with the weight and bias of that expert. If `is_gated`, the result is gated as in
    `Multiply`."""

    input: str  # [T, in_size] for tokens, or [T, num_chosen * in_size] for slots
    output: str  # [T, num_chosen * out_size]
    routes: str
    projection: Projection
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class CombineExperts:
    """The operation that sums the outputs of the experts chosen for each token. Each output is multiplied by the
    router's weight for that expert. The outputs are added in the order of the experts."""

    input: str  # [T, num_chosen * width]
    output: str  # [T, width]
    routes: str


@dataclass(frozen=True, slots=True)
class Gate:
    """The operation that multiplies a buffer by a gate: output = input * sigmoid(gate)."""

    input: str
    gate: str  # [T, 1], or of the input's width
    output: str


@dataclass(frozen=True, slots=True)
class Clip:
    """The operation that clamps every value of a buffer to the range from -limit to limit. NaN stays NaN."""

    input: str
    output: str
    limit: float


class BlockPattern(NamedTuple):
    """The blocks of positions that queries attend to, in block-sparse attention (Phi-3, Abdin et al., 2024,
    https://arxiv.org/abs/2404.14219). A block is `block_size` consecutive positions of a sequence, and no block of the
    KV cache. A query attends to the last `num_local` blocks up to its own position, and to some earlier blocks: head h
    attends to block b if `(b + first + h * head_step) % stride` is 0."""

    block_size: int
    num_local: int
    stride: int
    first: int
    head_step: int


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The attention heads of one layer. Query heads may share key and value heads (grouped-query attention, Ainslie et
    al., 2023, https://arxiv.org/abs/2305.13245). The other fields define how attention scores are computed, see
    `Scoring` in `pagewire.kernels.arguments`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the dot products of queries and keys
    # Number of positions that a query attends to, including its own; 0: all preceding positions and its own.
    window: int = 0
    softcap: float = 0.0  # scores are bounded to softcap * tanh(score / softcap); 0: no bound
    alibi_slopes: tuple[float, ...] = ()  # [num_heads]; empty: no ALiBi
    pattern: BlockPattern | None = None  # of a layer without a window; None: queries attend to all blocks

    def of_rank(self, rank: int, num_ranks: int) -> "AttentionHeads":
        """Return the attention heads that one tensor-parallel rank computes. If there are more ranks than KV heads,
        several ranks have the same KV head."""
        share = self.num_heads // num_ranks
        slopes = self.alibi_slopes[rank * share : (rank + 1) * share]
        num_kv_heads, pattern = max(1, self.num_kv_heads // num_ranks), self.pattern
        if pattern is not None:
            pattern = pattern._replace(first=pattern.first + rank * share * pattern.head_step)
        return replace(self, num_heads=share, num_kv_heads=num_kv_heads, alibi_slopes=slopes, pattern=pattern)


@dataclass(frozen=True, slots=True)
class QkNormRopeStore:
    """The operation that prepares queries, keys and values for attention. The input contains the queries, then the
    keys, then the values. Queries and keys are normalized if there is a norm weight, then rotated by their positions if
    there is a rope. With `rotates_first`, they are rotated before they are normalized. Keys and values are stored in
    the KV cache. The queries are the output."""

    input: str  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    output: str  # [T, num_heads * head_dim]
    layer: int
    heads: AttentionHeads
    num_positions: int  # the number of positions in the rope's tables
    query_norm: Vector | None = None
    key_norm: Vector | None = None
    eps: float = 0.0
    rope: RopeConfig | None = None
    growth: QueryScaling | None = None
    rotates_first: bool = False


@dataclass(frozen=True, slots=True)
class AttendPaged:
    """The operation of paged attention (Kwon et al., 2023, https://arxiv.org/abs/2309.06180). The queries of a sequence
    attend to the keys and values that the KV cache stores for this sequence and layer."""

    input: str
    output: str
    layer: int
    heads: AttentionHeads
    sinks: Vector | None = None  # [num_heads], see `Scoring.sinks`


@dataclass(frozen=True, slots=True)
class Convolve:
    """The operation of a causal convolution over the tokens of a sequence, with a kernel of its own for each channel:
    y[t] = sum over j of weight[j] * x[t - kernel_size + 1 + j] + bias, in the order of j. Inputs of positions below 0
    are 0. The last kernel_size - 1 inputs of a sequence are in its state.

    If `is_gated`, the input has three parts B, C and x of equal width, and the output is C * y, where the inputs of the
    convolution are B * x (LFM2, Liquid AI, 2025, https://arxiv.org/abs/2511.23404). Otherwise the output is silu(y)."""

    input: str  # [T, width], or [T, 3 * width] if `is_gated`
    output: str  # [T, width]
    weight: Vector  # width * kernel_size values: the kernel of each channel, one after another
    kernel_size: int
    bias: Vector | None = None
    is_gated: bool = False

    @property
    def state_shape(self) -> tuple[int, int]:
        """The shape of the state: the last inputs of all channels, the earliest first."""
        return self.kernel_size - 1, self.weight.num_elements // self.kernel_size


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The operation of the gated delta rule (Yang et al., "Gated Delta Networks", 2024,
    https://arxiv.org/abs/2412.06464), computed token by token in float32. The input has the queries and keys of all key
    heads, then the values of all heads. `gate` has a number b, then a number a for each head. Value head h uses key
    head h // (num_heads / num_key_heads). With the state S [key_dim, value_dim] of a head, and q and k divided by
    sqrt(sum of squares + 1e-6), and q by sqrt(key_dim):

        S = exp(decay * softplus(a + bias)) * S;  d = sigmoid(b) * (v - S^T k);  S = S + k d^T;  output = S^T q
    """

    input: str  # [T, 2 * num_key_heads * key_dim + num_heads * value_dim]
    gate: str  # [T, 2 * num_heads]
    output: str  # [T, num_heads * value_dim]
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    decay: Vector  # [num_heads] float32, negative
    bias: Vector  # [num_heads] float32

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the state: the matrix of each head."""
        return self.num_heads, self.key_dim, self.value_dim

    def of_rank(self, num_ranks: int) -> "DeltaRule":
        """Return the operation on one of `num_ranks` tensor-parallel ranks. Their number must divide the key heads."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_key_heads=self.num_key_heads // num_ranks)


@dataclass(frozen=True, slots=True)
class NormalizeGated:
    """The operation of a gated RMS norm of each head: output = head / rms(head) * weight * silu(gate)."""

    input: str
    gate: str  # of the input's width
    output: str
    weight: Vector  # [head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class LmHead:
    """The operation that computes the logits from the final hidden states. It multiplies the input by the projection
    `head` and by `factor`. With a softcap, logits are bounded to softcap * tanh(logit / softcap)."""

    input: str
    head: Projection
    factor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The operation that sums a buffer over all tensor-parallel ranks. Every rank gets the sum."""

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
    | Convolve
    | DeltaRule
    | NormalizeGated
    | LmHead
    | AllReduce
)
_READ = ("input", "update", "gate", "routes")
OperationList: TypeAlias = tuple[Operation, ...]


def weights_of(operations: OperationList) -> tuple[Weight, ...]:
    """Return all weights of a model's operations, in the order of their first use and without duplicates."""
    values = (getattr(operation, field.name) for operation in operations for field in fields(operation))
    return tuple(dict.fromkeys(value for value in values if type(value) in (Vector, Table, Projection)))


def head_of(operations: OperationList) -> Projection:
    """Return the projection (the LM head) that computes logits from hidden states. The operations must contain exactly
    one `LmHead`."""
    (head,) = [operation.head for operation in operations if type(operation) is LmHead]
    return head


def embedding_of(operations: OperationList) -> Table | Projection:
    """Return the token embedding, which maps token ids to hidden states. The operations must contain exactly one
    `Embed`."""
    (table,) = [operation.table for operation in operations if type(operation) is Embed]
    return table


def replaced(operation: Any, change: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Return a copy of an operation of a model with some operands replaced, such as its weights. `change` maps the type
    of an operand to a function from the old operand to the new operand. Operands of other types stay unchanged."""
    operands = {field.name: getattr(operation, field.name) for field in fields(operation)}
    changed = {name: change[type(value)](value) for name, value in operands.items() if type(value) in change}
    return replace(operation, **changed) if changed else operation


def buffers_read(operation: Operation) -> set[str]:
    """Return the names of the activation buffers that an operation of a model reads."""
    return {getattr(operation, name) for name in _READ if getattr(operation, name, None) is not None}


def output_of(operation: Operation) -> str | None:
    """Return the name of the activation buffer that an operation of a model writes. For an `Add`, this is its input,
    which is updated in place. Return None if the operation writes no buffer, as for the LM head."""
    return operation.input if type(operation) is Add else getattr(operation, "output", None)


def last_uses(operations: OperationList) -> list[tuple[str, ...]]:
    """Return, for each operation of a model, the names of the activation buffers whose memory can be freed after the
    operation. The operation reads these buffers, and no later operation reads them before they are written again."""
    needed: set[str] = set()
    released = []
    for operation in reversed(operations):
        read, written = buffers_read(operation), {getattr(operation, "output", None)}
        released.append(tuple(sorted(read - needed)))
        needed = (needed - written) | read
    return released[::-1]


def state_shapes(operations: OperationList) -> dict[int, tuple[int, ...]]:
    """Return the shape of the state of each operation that has one, by the operation's index in the list. The state of
    a sequence contains them one after another, in float32."""
    return {
        index: operation.state_shape
        for index, operation in enumerate(operations)
        if isinstance(operation, Convolve | DeltaRule)
    }


def state_offsets(operations: OperationList) -> dict[int, int]:
    """Return the index of the first value in a sequence's state of each operation that has a state, by the operation's
    index in the list."""
    shapes = state_shapes(operations)
    return dict(zip(shapes, accumulate(map(prod, shapes.values()), initial=0), strict=False))


def num_elements(operations: OperationList) -> int:
    """Return the number of values that a model stores. This includes all weights, and the rope tables of cosines and
    sines for all positions. A token embedding that is tied to the LM head is counted once."""
    weights = {(weight.name, weight.num_elements) for weight in weights_of(operations)}
    turns = [operation for operation in operations if type(operation) is QkNormRopeStore]
    tables = {(turn.rope, turn.num_positions, turn.heads.head_dim) for turn in turns if turn.rope is not None}
    return sum(number for _, number in weights) + 2 * sum(size * head_dim for _, size, head_dim in tables)
