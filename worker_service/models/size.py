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
    is_gpt2 = config.rope is None
    positions = config.max_position_embeddings
    return ModelSize(
        embeddings=(config.vocab_size + (positions if is_gpt2 else 0)) * config.hidden_size,
        head=vocabulary_share(config.vocab_size, shard.size) * config.hidden_size,
        layers=config.num_layers * _layer_size(config) + (2 if is_gpt2 else 1) * config.hidden_size,
        rope=0 if is_gpt2 else 2 * positions * config.head_dim,
    )


def _layer_size(config: ModelConfig) -> int:
    is_gpt2 = config.rope is None
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, heads = config.num_heads * config.head_dim, config.num_heads + 2 * config.num_kv_heads
    products = hidden * (heads * config.head_dim + queries) + (2 if is_gpt2 else 3) * hidden * intermediate
    biases = (
        config.qkv_bias * heads * config.head_dim
        + config.output_bias * hidden
        + config.mlp_bias * ((1 if is_gpt2 else 2) * intermediate + hidden)
    )
    norms = (4 if is_gpt2 else 2) * hidden + config.qk_norm * 2 * config.head_dim
    return products + biases + norms
