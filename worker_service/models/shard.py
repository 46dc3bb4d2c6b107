"""The part of a tensor parallel model that one rank holds, and how many weights that has.

It is split as in Megatron-LM (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053): queries, keys and values, the
first products of the MLP and of each expert, and the head are split by their outputs, attention's output and the second
products by their inputs, so that ranks meet twice a layer and once for the logits. Embeddings, norms and routers are
whole on every rank."""

from dataclasses import dataclass, replace

from pagewire.common.network.config import ModelConfig
from pagewire.common.network.families.family import Split


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` among `size`."""

    whole: ModelConfig
    rank: int = 0
    size: int = 1

    @staticmethod
    def of(whole: ModelConfig, rank: int, size: int) -> "Shard":
        """Raises ValueError if the model cannot be shared out among so many ranks."""
        columns = {"attention heads": whole.num_heads}
        if not all(map(whole.has_experts, range(whole.num_layers))):
            columns["columns of the MLP"] = whole.intermediate_size
        if whole.experts is not None:
            columns["columns of an expert"] = whole.experts.intermediate_size
            columns["columns of the shared expert"] = whole.experts.shared_intermediate_size
        for what, number in columns.items():
            if number % size:
                raise _indivisible(size, f"divide the {number} {what}")
        if whole.num_kv_heads % size and size % whole.num_kv_heads:
            raise _indivisible(size, f"divide the {whole.num_kv_heads} KV heads, or be a multiple of them")
        return Shard(whole, rank, size)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it. Where there are more ranks than KV heads, several hold the same one."""
        experts = self.whole.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // self.size,
                shared_intermediate_size=experts.shared_intermediate_size // self.size,
            )
        slopes = self.whole.alibi_slopes
        share = len(slopes) // self.size
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=self.whole.intermediate_size // self.size,
            alibi_slopes=slopes[self.rank * share : (self.rank + 1) * share],
            experts=experts,
        )

    def length(self, split: Split) -> int:
        """Return the length of the whole dimension."""
        whole = self.whole
        return {
            Split.HEADS: whole.num_heads * whole.head_dim,
            Split.KV_HEADS: whole.num_kv_heads * whole.head_dim,
            Split.QKV_BY_HEAD: 3 * whole.num_heads * whole.head_dim,
            Split.HEAD_VALUES: whole.num_heads,
            Split.INTERMEDIATE: whole.intermediate_size,
            Split.EXPERT_INTERMEDIATE: 0 if whole.experts is None else whole.experts.intermediate_size,
            Split.SHARED_INTERMEDIATE: 0 if whole.experts is None else whole.experts.shared_intermediate_size,
            Split.VOCABULARY: whole.vocab_size,
        }[split]

    def span(self, split: Split) -> slice:
        """This rank's part of the dimension. Of the vocabulary the last ranks may have less than others, or nothing."""
        length = self.length(split)
        if split is Split.VOCABULARY:
            share = vocabulary_share(length, self.size)
            return slice(min(self.rank * share, length), min((self.rank + 1) * share, length))
        if split is Split.KV_HEADS:
            share = self.config.num_kv_heads * self.whole.head_dim
            first_head = self.rank * self.whole.num_kv_heads // self.size
            return slice(first_head * self.whole.head_dim, first_head * self.whole.head_dim + share)
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def vocabulary_share(vocab_size: int, size: int) -> int:
    """Logits that each of `size` ranks computes: the same number, so those of the last may stand for no token."""
    return -(-vocab_size // size)


def _indivisible(size: int, what: str) -> ValueError:
    return ValueError(f"--tensor-parallel-size is {size}; for this model it must {what}")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Elements of one rank's part."""

    embeddings: int
    head: int  # counted though it may be the embedding
    layers: int  # and the last norm
    rope: int  # of the tables of cosines and sines

    def num_bytes(self, element_bytes: int, *, is_tied: bool) -> int:
        """Return the bytes of the weights, with all elements of one size. `is_tied` says that the head is the
        embedding."""
        return element_bytes * (self.embeddings + self.layers + self.rope + (0 if is_tied else self.head))


def model_size(shard: Shard) -> ModelSize:
    """Return how many weights a rank has, by arithmetic: before any of them is there, and without torch."""
    config = shard.config
    positions = config.max_position_embeddings
    return ModelSize(
        embeddings=(config.vocab_size + positions * config.has_position_embedding) * config.hidden_size,
        head=vocabulary_share(config.vocab_size, shard.size) * config.hidden_size,
        layers=sum(_layer_size(config, layer) for layer in range(config.num_layers))
        + (1 + config.embedding_norm) * _norm_size(config),
        rope=2 * positions * config.head_dim * len({rope for rope in config.ropes if rope is not None}),
    )


def _layer_size(config: ModelConfig, layer: int) -> int:
    hidden = config.hidden_size
    queries, heads = config.num_heads * config.head_dim, config.num_heads + 2 * config.num_kv_heads
    products = hidden * (heads * config.head_dim + queries)
    biases = config.qkv_bias * heads * config.head_dim + config.output_bias * hidden
    kv_size = config.num_kv_heads * config.head_dim
    head_norms = {"none": 0, "head": 2 * config.head_dim, "projection": queries + kv_size}[config.qk_norm]
    norms = 2 * (config.pre_norm + config.post_norm) * _norm_size(config) + head_norms
    mlp = _mlp_size(config, config.intermediate_size, config.mlp_bias)
    norms += config.num_heads * config.has_sinks
    return products + biases + norms + (_experts_size(config) if config.has_experts(layer) else mlp)


def _mlp_size(config: ModelConfig, intermediate: int, has_bias: bool) -> int:
    hidden, num_parts = config.hidden_size, 1 + config.is_gated
    return (num_parts + 1) * hidden * intermediate + has_bias * (num_parts * intermediate + hidden)


def _experts_size(config: ModelConfig) -> int:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    router = experts.num_experts * (hidden + experts.has_router_bias + experts.has_correction)
    each = _mlp_size(config, experts.intermediate_size, experts.bias)
    shared = _mlp_size(config, experts.shared_intermediate_size, config.mlp_bias) + experts.has_shared_gate * hidden
    return router + experts.num_experts * each + (shared if experts.shared_intermediate_size else 0)


def _norm_size(config: ModelConfig) -> int:
    return (1 + config.norm_bias) * config.hidden_size
