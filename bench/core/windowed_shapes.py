"""Models whose layers have different windows: their attention, and their configuration with small other dimensions."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers

from pagewire.common.wire.messages import LayerGroup, WorkerCapacity
from pagewire.network.layer_groups import layer_groups
from pagewire.network.operations import AttentionHeads

BLOCK_SIZE = 16
NUM_VALUE_BYTES = 2  # the KV cache is bfloat16
MAX_NUM_BATCHED_TOKENS = 2048
VOCAB_SIZE = 1000
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Shape:
    """The attention of a model. `windows` has the window of each layer; 0: the layer attends to all positions."""

    name: str
    family: str  # transformers' model type
    windows: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    num_heads: int  # the fewest that are possible, because query heads use no KV cache
    options: tuple[tuple[str, Any], ...] = ()  # further fields of the configuration

    @property
    def layer_bytes(self) -> int:
        """The bytes of one position in one layer: a key and a value of each KV head."""
        return 2 * self.num_kv_heads * self.head_dim * NUM_VALUE_BYTES

    def formula_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a sequence needs by the formula of docs/models.md."""
        return sum(min(num_tokens, window or num_tokens) for window in self.windows) * self.layer_bytes

    def full_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a sequence needs if every layer keeps all positions."""
        return len(self.windows) * num_tokens * self.layer_bytes

    def grouped(self, max_model_len: int) -> "Layout":
        """Return the layout of the KV cache with the layer groups that the worker would choose."""
        heads = [AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim, 1.0, each) for each in self.windows]
        groups = layer_groups(heads, max_model_len)
        most = max(len(group.layers) for group in groups)
        sizes = tuple(LayerGroup(group.window, len(group.layers)) for group in groups)
        return Layout(sizes, most * BLOCK_SIZE * self.layer_bytes)

    def ungrouped(self) -> "Layout":
        """Return the layout of the KV cache if one group has all layers, and keeps all positions."""
        num_layers = len(self.windows)
        return Layout((LayerGroup(0, num_layers),), num_layers * BLOCK_SIZE * self.layer_bytes)

    def write_config(self, directory: Path) -> Path:
        """Write the config.json of a model with this attention, for random weights. Return the directory."""
        types = ["sliding_attention" if window else "full_attention" for window in self.windows]
        config = transformers.AutoConfig.for_model(
            self.family,
            num_hidden_layers=len(self.windows),
            layer_types=types,
            sliding_window=max(self.windows),
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=131_072,
            dtype="bfloat16",
            **SMALL,
            **dict(self.options),
        )
        config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(directory)
        return directory


@dataclass(frozen=True)
class Layout:
    """The layer groups of a KV cache, and the bytes of its blocks."""

    groups: tuple[LayerGroup, ...]
    block_bytes: int

    @cached_property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.sliding_window for group in self.groups)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The window and the number of layers of each group."""
        return [(group.sliding_window, group.num_layers) for group in self.groups]

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence needs in all groups, by the formula of docs/models.md."""
        return sum(-(-min(num_tokens, window or num_tokens) // BLOCK_SIZE) for window in self.windows)

    def capacity(
        self,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    ) -> WorkerCapacity:
        """Return the capacity of a worker with this KV cache."""
        return WorkerCapacity(
            worker_id="bench",
            model_digest=b"",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_device_blocks=num_blocks,
            block_bytes=self.block_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            device="",
            dtype="",
            attention_backend="",
            layer_groups=self.groups,
        )


GEMMA_3 = Shape("Gemma 3 1B", "gemma3_text", (*(512,) * 5, 0) * 4 + (512,) * 2, 1, 256, 1)
EXPERTS = (("num_local_experts", 4), ("num_experts_per_tok", 2))
GPT_OSS = Shape("gpt-oss-20b", "gpt_oss", (128, 0) * 12, 8, 64, 8, EXPERTS)
EXAONE_4 = Shape("EXAONE 4 32B", "exaone4", (4096, 4096, 4096, 0) * 16, 8, 128, 8)
# Fewer layers and KV heads, so that one machine can compute a long prompt.
SMALL_GPT_OSS = Shape("gpt-oss, 2 layers", "gpt_oss", (128, 0), 8, 64, 8, EXPERTS)
SMALL_EXAONE_4 = Shape("EXAONE 4, 4 layers", "exaone4", (4096, 4096, 4096, 0), 2, 128, 2)
