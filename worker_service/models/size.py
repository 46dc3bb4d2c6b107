"""How many weights a model has, by arithmetic on its config: before any of it is built, and without torch."""

from dataclasses import dataclass

from worker_service.models.config import ModelConfig
from worker_service.models.shard import Shard, vocabulary_share


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
