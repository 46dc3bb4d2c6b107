"""Composes the list of operations of a model: the only telling of what it computes.

A layer adds to its input `x` what attention makes of it, then what the MLP makes of that, or of the same where the
model is parallel. What is added is written to a buffer of its own, and added by the norm that reads the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagewire.common.network.config import Experts, ModelConfig
from pagewire.common.network.operations import (
    Activate,
    Add,
    AllReduce,
    AttendPaged,
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
    Projection,
    QkNormRopeStore,
    RouteTopK,
    Table,
    Vector,
)
from pagewire.common.network.shard import Shard, vocabulary_share


def compose(shard: Shard) -> tuple[Operation, ...]:
    """Return what one rank computes of a model."""
    return tuple(_Composition(shard.config, shard.rank, shard.size).model())


@dataclass(slots=True)
class _Composition:
    config: ModelConfig  # with the heads and columns of this rank
    rank: int
    num_ranks: int
    updates: list[str] = field(default_factory=list)  # buffers that are still to be added to x

    def model(self) -> Iterator[Operation]:
        config = self.config
        hidden, positions = config.hidden_size, config.max_position_embeddings
        learnt = Table("position_embedding", positions, hidden) if config.has_position_embedding else None
        embedded = "embedded" if config.embedding_norm else "x"
        yield Embed(embedded, Table("embedding", config.vocab_size, hidden), learnt, config.embedding_multiplier)
        if config.embedding_norm:
            yield self.normalize(embedded, "x", "embedding_norm")
        for layer in range(config.num_layers):
            yield from self.layer(layer, f"layers.{layer}")
        yield from self.read("norm")
        num_logits = vocabulary_share(config.vocab_size, self.num_ranks)
        head = Projection("head", hidden, (num_logits,), gives_float32=True)
        yield LmHead("normed", head, config.logits_multiplier, config.logits_softcap)

    def layer(self, layer: int, name: str) -> Iterator[Operation]:
        config = self.config
        source = "normed" if config.pre_norm else "x"
        yield from self.read(f"{name}.attention_norm" if config.pre_norm else None)
        yield from self.attention(layer, f"{name}.attention", source, "update")
        if not config.is_parallel:
            yield from self.finish("update", f"{name}.attention_post_norm")
        yield from self.read(f"{name}.mlp_norm" if config.pre_norm else None)
        if config.is_parallel:
            yield from self.finish("update", f"{name}.attention_post_norm")
        target = "mlp_update" if config.is_parallel else "update"
        if config.experts is not None and config.has_experts(layer):
            yield from self.experts(config.experts, f"{name}.mlp", source, target)
        else:
            yield from self.mlp(config.intermediate_size, f"{name}.mlp", source, target)
        yield from self.sum_ranks(target)
        yield from self.finish(target, f"{name}.mlp_post_norm")

    def attention(self, layer: int, name: str, source: str, target: str) -> Iterator[Operation]:
        """Paged attention with grouped heads (Ainslie et al., 2023, https://arxiv.org/abs/2305.13245)."""
        config, rope = self.config, self.config.ropes[layer]
        sizes = tuple(num * config.head_dim for num in (config.num_heads, config.num_kv_heads, config.num_kv_heads))
        order = None if rope is None else rope.head_order(config.head_dim)
        qkv = Projection(
            f"{name}.qkv", config.hidden_size, sizes, has_bias=config.qkv_bias, row_order=_row_order(config, order)
        )
        output = self.reducing(f"{name}.output", sizes[0], has_bias=config.output_bias)
        query_norm = self.head_norm(f"{name}.query_norm", config.num_heads, order)
        key_norm = self.head_norm(f"{name}.key_norm", config.num_kv_heads, order)
        heads = "heads"
        yield Multiply(source, heads, qkv)
        if config.qk_norm == "projection" and query_norm is not None and key_norm is not None:
            yield NormalizeProjections(heads, "normed_heads", query_norm, key_norm, config.norm_eps)
            heads, query_norm, key_norm = "normed_heads", None, None
        if config.qkv_limit:
            yield Clip(heads, "clipped_heads", config.qkv_limit)
            heads = "clipped_heads"
        yield QkNormRopeStore(
            *(heads, "queries", layer, config.num_heads, config.head_dim, config.max_position_embeddings),
            *(query_norm, key_norm, config.norm_eps, rope, config.query_growth),
        )
        sinks = Vector(f"{name}.sinks", config.num_heads, is_float32=True)
        yield AttendPaged("queries", "attended", layer, sinks if config.has_sinks else None)
        yield Multiply("attended", target, output)
        yield from self.sum_ranks(target)

    def mlp(self, size: int, name: str, source: str, target: str, prefix: str = "") -> Iterator[Operation]:
        """An activation between two products; or gated, as GLU variants are (Shazeer, 2020,
        https://arxiv.org/abs/2002.05202). `prefix`: of the buffers in between."""
        config = self.config
        sizes = (size,) * (1 + config.is_gated)
        yield Multiply(
            source, f"{prefix}up", Projection(f"{name}.up", config.hidden_size, sizes, has_bias=config.mlp_bias)
        )
        yield self.activate(f"{prefix}up", f"{prefix}activated")
        yield Multiply(f"{prefix}activated", target, self.reducing(f"{name}.down", size, has_bias=config.mlp_bias))

    def experts(self, experts: Experts, name: str, source: str, target: str) -> Iterator[Operation]:
        """The sum of what a token's experts make of it, times their weights, and of what the shared one does, if there
        is one (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538). Ranks have some columns of each expert, and all
        of the router."""
        config, size, num_experts = self.config, experts.intermediate_size, experts.num_experts
        hidden = config.hidden_size
        router = Projection(
            f"{name}.router",
            hidden,
            (num_experts,),
            has_bias=experts.has_router_bias,
            is_float32=True,
        )
        up = Projection(
            f"{name}.up", hidden, (size,) * (1 + config.is_gated), has_bias=experts.bias, num_experts=num_experts
        )
        down = self.reducing(f"{name}.down", size, has_bias=experts.bias, num_experts=num_experts)
        yield Multiply(source, "router_logits", router)
        correction = Vector(f"{router.name}.e_score_correction_bias", num_experts, is_float32=True)
        yield RouteTopK("router_logits", "routes", experts.routing, correction if experts.has_correction else None)
        yield MultiplyRouted(source, "up_slots", "routes", up)
        yield self.activate("up_slots", "activated_slots", experts.routing.num_chosen)
        yield MultiplyRouted("activated_slots", "down_slots", "routes", down)
        yield CombineExperts("down_slots", target, "routes")
        if experts.shared_intermediate_size:
            yield from self.mlp(experts.shared_intermediate_size, f"{name}.shared", source, "shared", "shared_")
            if experts.has_shared_gate:
                gate = Projection(f"{name}.shared_gate", hidden, (1,), is_float32=True)
                yield Multiply(source, "shared_gate", gate)
                yield Gate("shared", "shared_gate", "shared")
            yield Add(target, "shared")

    def reducing(self, name: str, in_size: int, *, has_bias: bool, num_experts: int = 0) -> Projection:
        """A projection whose inputs ranks share out, so that its outputs are summed up."""
        return Projection(
            name,
            in_size,
            (self.config.hidden_size,),
            has_bias=has_bias,
            adds_bias=self.rank == 0,
            num_experts=num_experts,
        )

    def sum_ranks(self, buffer: str) -> Iterator[Operation]:
        if self.num_ranks > 1:
            yield AllReduce(buffer, buffer)

    def activate(self, source: str, output: str, num_parts: int = 1) -> Activate:
        config = self.config
        return Activate(
            source, output, config.activation, config.is_gated, num_parts, config.swiglu_alpha, config.swiglu_limit
        )

    def normalize(self, source: str, output: str, norm: str, update: str | None = None) -> Normalize:
        """`norm`: its name."""
        config, size, adds_one = self.config, self.config.hidden_size, self.config.norm_adds_one
        return Normalize(
            source,
            output,
            Vector(f"{norm}.weight", size, is_float32=adds_one, adds_one=adds_one),
            config.norm_eps,
            update,
            Vector(f"{norm}.bias", size, is_float32=adds_one) if config.norm_bias else None,
            is_centered=config.norm == "layer",
            factor=config.residual_multiplier,
        )

    def head_norm(self, name: str, num_heads: int, order: list[int] | None) -> Vector | None:
        """Of the values of one of so many heads, or of all; None: they are not normalized."""
        config = self.config
        num_normed = {"none": 0, "head": 1, "projection": num_heads}[config.qk_norm]
        if not num_normed:
            return None
        adds_one, ordered = config.norm_adds_one, _repeated(order or [], num_normed)
        size = num_normed * config.head_dim
        return Vector(f"{name}.weight", size, is_float32=adds_one, adds_one=adds_one, order=tuple(ordered))

    def read(self, norm: str | None) -> Iterator[Operation]:
        """Adds to x what is still to be added, and normalizes it where there is a norm."""
        while self.updates and (norm is None or len(self.updates) > 1):
            yield Add("x", self.updates.pop(0), self.config.residual_multiplier)
        if norm is not None:
            yield self.normalize("x", "normed", norm, self.updates.pop() if self.updates else None)

    def finish(self, update: str, norm: str) -> Iterator[Operation]:
        """What becomes of an update before it is added."""
        if self.config.post_norm:
            yield self.normalize(update, f"normed_{update}", norm)
            update = f"normed_{update}"
        self.updates.append(update)


def _row_order(config: ModelConfig, order: list[int] | None) -> tuple[int, ...]:
    """Which row of the checkpoint's queries, keys and values each of ours is; none: they are in that order."""
    num_heads, num_kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    if order is None and not config.qkv_by_head:
        return ()
    heads = _repeated(order or list(range(size)), num_heads + num_kv_heads)
    rows = [*heads, *range(len(heads), len(heads) + num_kv_heads * size)]
    if config.qkv_by_head:
        # The checkpoint has each head's query, key and value together.
        rows = [(row // size % num_heads * 3 + row // size // num_heads) * size + row % size for row in rows]
    return tuple(rows)


def _repeated(order: list[int], num_heads: int) -> list[int]:
    """The order of the values of several heads."""
    return [head * len(order) + value for head in range(num_heads) for value in order]
