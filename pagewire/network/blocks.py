"""The building blocks of models, which families compose. Each block yields operations on weights with the names that
they have in the checkpoint.

A layer adds the output of attention to its input `x`, then the output of the MLP. Blocks read the buffer `normed` and
write the buffer `update` unless the caller names others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.operations import (
    Activate,
    Activation,
    Add,
    AttendPaged,
    AttentionHeads,
    Clip,
    CombineExperts,
    Embed,
    Gate,
    LmHead,
    Multiply,
    MultiplyRouted,
    Normalize,
    NormalizeProjections,
    Operation,
    Part,
    Projection,
    QkNormRopeStore,
    RouteTopK,
    Share,
    StoredRows,
    Table,
    Vector,
)
from pagewire.network.rope import QueryScaling, RopeConfig


@dataclass(frozen=True, slots=True)
class Norm:
    """The settings of a model's norms over hidden states. Call an instance with the name of a norm to get its
    operation. The norms are RMS norms or, if `is_centered`, layer norms."""

    size: int
    eps: float
    is_centered: bool = False
    has_bias: bool = False
    adds_one: bool = False  # multiply by 1 + weight, in float32; norms of heads do so too
    has_weight: bool = True

    def __call__(self, name: str, source: str = "x", target: str = "normed") -> Normalize:
        values, adds_one = Share.of(self.size), self.adds_one
        weight = Vector(f"{name}.weight", values, adds_one, adds_one, self.has_weight)
        bias = Vector(f"{name}.bias", values, is_float32=adds_one) if self.has_bias else None
        return Normalize(source, target, weight, self.eps, bias=bias, is_centered=self.is_centered)


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention block of one layer. Call an instance with the names of the weights to get the operations of the
    block."""

    layer: int
    hidden_size: int
    heads: AttentionHeads
    rope: RopeConfig | None
    num_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    # RMS norm of queries and keys: over each head, the same without weight, or over all heads. Or a layer norm of each
    # head, with its own weight.
    qk_norm: Literal["none", "head", "unweighted", "projection", "layer_norm"] = "none"
    norm_eps: float = 0.0
    norm_adds_one: bool = False
    rotates_first: bool = False  # heads are rotated before they are normalized, not after
    # Bound on the absolute values of queries, keys and values, applied after norms of projections; 0: no bound.
    limit: float = 0.0
    growth: QueryScaling | None = None
    has_sinks: bool = False
    # The attended values are multiplied by the sigmoid of a projection of the input, `gate_proj`.
    has_gate: bool = False
    # The same, but the module of the queries stores the rows of each head's gates after the head's query rows.
    has_gated_queries: bool = False

    def __call__(
        self,
        name: str,
        qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        output: str = "o_proj",
        *,
        are_by_head: bool = False,
        is_transposed: bool = False,
        source: str = "normed",
    ) -> Iterator[Operation]:
        """Yield the operations of paged attention of the module `name`, which reads the buffer `source`.

        `qkv` are the names within the module of the projections for queries, keys and values. If `qkv` has a single
        name, this projection contains all query rows, then all key rows, then all value rows. With `are_by_head`, it
        contains the query, key and value rows of each KV head together. `output` is the name of the output projection.
        With `is_transposed`, weights are stored as [in, out].
        """
        heads, order = self.heads, () if self.rope is None else self.rope.head_order(self.heads.head_dim)
        values = heads.head_dim
        unit = (heads.num_heads // heads.num_kv_heads * values, values, values) if are_by_head else ()
        parts, hidden, stored = self._qkv(name, qkv, unit), Share.of(self.hidden_size), StoredRows(order, unit)
        products = Projection(parts, hidden, self.qkv_bias, is_transposed=is_transposed, stored=stored)
        yield Multiply(source, "heads", products)
        query_norm = self._norm(f"{name}.q_norm", heads.num_heads, order)
        key_norm = self._norm(f"{name}.k_norm", heads.num_kv_heads, order)
        made = "heads"
        if self.qk_norm in ("projection", "layer_norm") and query_norm is not None and key_norm is not None:
            size = query_norm.row_size
            yield NormalizeProjections(made, "normed_heads", query_norm, key_norm, self.norm_eps, size)
            made, query_norm, key_norm = "normed_heads", None, None
        if self.limit:
            yield Clip(made, "clipped_heads", self.limit)
            made = "clipped_heads"
        norms, turns = (query_norm, key_norm, self.norm_eps), (self.rope, self.growth, self.rotates_first)
        yield QkNormRopeStore(made, "queries", self.layer, heads, self.num_positions, *norms, *turns)
        sinks = Vector(f"{name}.sinks", _of_heads(heads.num_heads, 1), is_float32=True)
        yield AttendPaged("queries", "attended", self.layer, heads, sinks if self.has_sinks else None)
        yield from self._project(name, qkv[0], output, source, is_transposed=is_transposed)

    def _project(
        self, name: str, queries: str, output: str, source: str, *, is_transposed: bool
    ) -> Iterator[Operation]:
        """Yield the operations that follow attention: the gate, which depends on the buffer `source`, if the layer has
        one, and the output projection."""
        hidden, size = Share.of(self.hidden_size), self.heads.head_dim
        columns, attended = _of_heads(self.heads.num_heads * size, size), "attended"
        if self.has_gate or self.has_gated_queries:
            gates = Part(f"{name}.gate_proj", columns)
            if self.has_gated_queries:
                gates = Part(f"{name}.{queries}", columns, 2 * size, size)
            has_bias = self.qkv_bias and self.has_gated_queries
            yield Multiply(source, "head_gates", Projection((gates,), hidden, has_bias))
            yield Gate(attended, "head_gates", "gated_heads")
            attended = "gated_heads"
        down = Projection((Part(f"{name}.{output}", hidden),), columns, self.output_bias, is_transposed=is_transposed)
        yield Multiply(attended, "update", down)

    def _qkv(self, name: str, qkv: tuple[str, ...], unit: tuple[int, ...]) -> tuple[Part, ...]:
        heads, size = self.heads, self.heads.head_dim
        queries = _of_heads(heads.num_heads * size, size)
        values = Share.of(heads.num_kv_heads * size, size, "KV heads", is_repeated=True)
        shares = [queries, values, values]
        if unit:
            shares = [Share.of(heads.num_kv_heads * sum(unit), sum(unit), "KV heads")]
        first, *others = parts_of([f"{name}.{each}" for each in qkv], shares)
        return (replace(first, period=2 * size) if self.has_gated_queries else first, *others)

    def _norm(self, name: str, num_heads: int, order: tuple[int, ...]) -> Vector | None:
        """Return the weight of the norm of the queries, or of the keys, of `num_heads` heads. Depending on `qk_norm`,
        every head uses the same weight, or the weight has different values for each head. Return None if the layer does
        not normalize queries and keys."""
        size, adds_one = self.heads.head_dim, self.norm_adds_one
        if self.qk_norm == "none":
            return None
        values, is_stored = Share.of(size), self.qk_norm != "unweighted"
        if self.qk_norm in ("projection", "layer_norm"):
            values = Share.of(num_heads * size, size, "heads", is_repeated=True)
        own_dim = size if self.qk_norm == "layer_norm" else 0
        return Vector(f"{name}.weight", values, adds_one, adds_one, is_stored, own_dim, order)


def _of_heads(size: int, head_dim: int) -> Share:
    return Share.of(size, head_dim, "attention heads")


def parts_of(names: list[str], shares: list[Share]) -> Iterator[Part]:
    """Yield the parts of a projection, such as queries, keys and values, in their order along the output dimension. If
    `names` has one checkpoint module for each part, each part is in its own module. If `names` has a single module,
    this module stores all parts as consecutive rows. `shares` has the rows of each part."""
    whole, first = sum(share.size for share in shares), 0
    for number, share in enumerate(shares):
        if len(names) == len(shares):
            yield Part(names[number], share)
        else:
            yield Part(names[0], replace(share, whole=whole, first=first))
        first += share.size


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP block of one layer: an activation between two linear layers. Call an instance with the names of the
    weights to get the operations of the block. If the activation is gated, this is a GLU variant (Shazeer, 2020,
    https://arxiv.org/abs/2002.05202)."""

    hidden_size: int
    size: int
    activation: Activate
    has_bias: bool = False
    counted: str = "columns of the MLP"
    is_interleaved: bool = False  # the checkpoint stores the rows of gates and ups in turn, in one module

    def __call__(
        self,
        name: str,
        up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        *,
        is_transposed: bool = False,
        source: str = "normed",
        target: str = "update",
        prefix: str = "",
    ) -> Iterator[Operation]:
        """Yield the operations of the MLP with the module `name`. The MLP reads the buffer `source` and writes the
        buffer `target`.

        `up` has the names within the module of the gate and up projections. If `up` has a single name, this projection
        contains both or, without a gate, it is the up projection. `down` is the name of the down projection. With
        `is_transposed`, weights are stored as [in, out]. `prefix` begins the names of intermediate buffers.
        """
        ups = self.up(name, up, is_transposed=is_transposed)
        yield Multiply(source, f"{prefix}up", ups)
        yield replace(self.activation, input=f"{prefix}up", output=f"{prefix}activated")
        yield Multiply(f"{prefix}activated", target, self.down(name, down, is_transposed=is_transposed))

    def up(self, name: str, names: tuple[str, ...], *, is_transposed: bool = False, num_experts: int = 0) -> Projection:
        """Return the first projection of the MLP. It contains the gate projection, if there is a gate, and then the up
        projection."""
        shares = [self._share()] * (2 if self.activation.is_gated else 1)
        if self.is_interleaved:
            shares = [Share.of(2 * self.size, 2, self.counted)]
        parts = tuple(parts_of([f"{name}.{each}" for each in names], shares))
        stored = StoredRows(unit=(1, 1) if self.is_interleaved else ())
        how: dict[str, Any] = {"is_transposed": is_transposed, "num_experts": num_experts, "stored": stored}
        return Projection(parts, Share.of(self.hidden_size), self.has_bias, **how)

    def down(self, name: str, down: str, *, is_transposed: bool = False, num_experts: int = 0) -> Projection:
        """Return the second projection of the MLP, the down projection."""
        parts = (Part(f"{name}.{down}", Share.of(self.hidden_size)),)
        return Projection(parts, self._share(), self.has_bias, is_transposed=is_transposed, num_experts=num_experts)

    def _share(self) -> Share:
        return Share.of(self.size, 1, self.counted)


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts block of one layer: a router sends each token to a few experts, and each expert is an MLP.
    The router's logits are float32. The terms are defined in `pagewire.kernels.experts`."""

    routing: ExpertRouting
    num_experts: int
    mlp: Mlp  # of each expert

    def __call__(
        self,
        router: str,
        name: str,
        up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        *,
        router_bias: bool = False,
        correction: Vector | None = None,
        weighs_input: bool = False,
        source: str = "normed",
        target: str = "update",
    ) -> Iterator[Operation]:
        """Yield the operations of the block. For each token, they sum the outputs of the token's experts, each
        multiplied by its weight (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538). With several tensor-parallel
        ranks, each rank has some columns of every expert and the whole router.

        `router` is the name of the router's module. `name` is the name of the experts' modules, with `{expert}` for the
        number of the expert. `up` and `down` are names within an expert's module, as in `Mlp`. `correction` is added to
        the router's scores for the choice of experts, but not for their weights. With `weighs_input`, a token has a
        single expert, whose input is multiplied by the weight instead of its output.
        """
        num_experts, chosen = self.num_experts, self.routing.num_chosen
        yield Multiply(source, "router_logits", whole(router, self.mlp.hidden_size, num_experts, has_bias=router_bias))
        yield RouteTopK("router_logits", "routes", self.routing, correction)
        slots = "down_slots"
        if weighs_input:
            yield CombineExperts(source, "weighted", "routes")
            source, slots = "weighted", target
        yield MultiplyRouted(source, "up_slots", "routes", self.mlp.up(name, up, num_experts=num_experts))
        yield replace(self.mlp.activation, input="up_slots", output="activated_slots", num_parts=chosen)
        downs = self.mlp.down(name, down, num_experts=num_experts)
        yield MultiplyRouted("activated_slots", slots, "routes", downs)
        if not weighs_input:
            yield CombineExperts(slots, target, "routes")

    def correction(self, name: str, *, is_row: bool = False) -> Vector:
        """Return the correction of the router's scores that the checkpoint stores under `name`: one number per expert,
        or a matrix with them as its only row."""
        return Vector(name, Share.of(self.num_experts), is_float32=True, row_size=self.num_experts if is_row else 0)


def whole(name: str, in_size: int, out_size: int, *, has_bias: bool = False) -> Projection:
    """Return a float32 projection that is not split by tensor parallelism, such as a router. Every rank stores the
    whole weight."""
    return Projection((Part(name, Share.of(out_size)),), Share.of(in_size), has_bias, is_float32=True)


def shared_expert(mlp: Mlp, name: str, gate: str | None = None) -> Iterator[Operation]:
    """Yield operations that add the output of a shared expert to the output of the routed experts. A shared expert is
    an MLP that processes every token. If `gate` names a projection, the shared expert's output is multiplied by the
    sigmoid of this projection of the input."""
    yield from replace(mlp, counted="columns of the shared expert")(name, target="shared", prefix="shared_")
    if gate is not None:
        yield Multiply("normed", "shared_gate", whole(gate, mlp.hidden_size, 1))
        yield Gate("shared", "shared_gate", "shared")
    yield Add("update", "shared")


def layer(
    norm: Norm,
    norms: tuple[str, str],
    attention: Iterator[Operation],
    mlp: Iterator[Operation],
    *,
    post_norms: tuple[str, str] | None = None,
    factor: float = 1.0,
) -> Iterator[Operation]:
    """Yield the operations of a transformer layer, with a norm before attention and a norm before the MLP.

    `norms` has the names of these two norms. `post_norms` has the names of the norms after attention and after the MLP,
    or is None if the layer has no such norms. `factor` scales the outputs of attention and MLP before they are added to
    the hidden states `x`.
    """
    for number, block in enumerate((attention, mlp)):
        yield norm(norms[number])
        yield from block
        yield from add_update(norm, None if post_norms is None else post_norms[number], factor)


def parallel_layer(
    norm: Norm, name: str, attention: Iterator[Operation], mlp: Iterator[Operation], mlp_norm: str | None = None
) -> Iterator[Operation]:
    """Yield the operations of a transformer layer whose attention and MLP run in parallel on the normalized input.
    `name` is the name of the norm. If `mlp_norm` names a second norm, the MLP reads the result of that norm of the same
    input. `mlp` must write the buffer `mlp_update`."""
    yield norm(name)
    yield from attention
    if mlp_norm is not None:
        yield norm(mlp_norm)
    yield from mlp
    yield Add("x", "update")
    yield Add("x", "mlp_update")


def add_update(norm: Norm, post_norm: str | None, factor: float = 1.0) -> Iterator[Operation]:
    """Yield operations that add the buffer `update`, the output of attention or an MLP, to the hidden states `x`. If
    `post_norm` names a norm, the update is normalized first."""
    if post_norm is not None:
        yield norm(post_norm, "update", "normed_update")
    yield Add("x", "update" if post_norm is None else "normed_update", factor)


def embed(name: str, vocab_size: int, width: int, factor: float = 1.0) -> Embed:
    """Return the operation that converts token ids to hidden states with an embedding table. The hidden states are
    multiplied by `factor`."""
    return Embed("x", Table(name, vocab_size, width), None, factor)


def lm_head(
    name: str, hidden_size: int, vocab_size: int, factor: float = 1.0, softcap: float = 0.0, *, has_bias: bool = False
) -> LmHead:
    """Return the operation that converts final hidden states to logits. With tensor parallelism, the vocabulary is
    split among the ranks and padded, so that every rank computes the same number of logits."""
    rows = Share.of(vocab_size, 1, "tokens", is_padded=True)
    head = Projection((Part(name, rows),), Share.of(hidden_size), has_bias, gives_float32=True)
    return LmHead("normed", head, factor, softcap)


def activation(function: Activation, *, is_gated: bool = True, alpha: float = 1.0, limit: float = 0.0) -> Activate:
    """Return the activation operation between the linear layers of an MLP. The names of its buffers are left empty,
    since `Mlp` sets them."""
    return Activate("", "", function, is_gated, alpha=alpha, limit=limit)
