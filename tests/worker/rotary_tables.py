"""Configurations of rotary positions, and their tables."""

from pagewire.network.rope import RopeConfig
from worker_service.models.rope import RotaryEmbedding


def filled_tables(config: RopeConfig, head_dim: int = 32, num_positions: int = 3000) -> RotaryEmbedding:
    tables = RotaryEmbedding(config, head_dim, num_positions)
    tables.finish_loading()
    return tables


SCALINGS = [
    RopeConfig(theta=500_000.0),
    RopeConfig(rotary_share=0.5, attention_factor=1.19),
    RopeConfig("yarn", 1e6, factor=4.0, original_max_position_embeddings=1000, attention_factor=1.1),
    RopeConfig("llama3", 5e5, factor=8.0, original_max_position_embeddings=512),
]
