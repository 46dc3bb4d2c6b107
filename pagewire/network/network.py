"""A model as described by the files of a checkpoint."""

from dataclasses import dataclass, replace
from math import prod

from pagewire.network.operations import (
    AttendPaged,
    AttentionHeads,
    OperationList,
    QkNormRopeStore,
    head_of,
    state_shapes,
)
from pagewire.network.rewrites import cut, with_ropes
from pagewire.network.rope import RopeConfig
from pagewire.network.weight_formats import Quantization


@dataclass(frozen=True, slots=True)
class Network:
    """The structure of a model: the list of its operations, and global properties such as the data type and the number
    of positions."""

    architecture: str
    operations: OperationList
    max_position_embeddings: int  # the number of positions that the model distinguishes, including rope scaling
    tie_word_embeddings: bool  # the head uses the embedding's weight, unless the checkpoint has a head
    dtype: str  # the checkpoint's dtype; float32 if it names none
    quantization: Quantization | None = None  # the quantisation of the checkpoint's weights
    # Every token attends to all tokens of its sequence, as in embedding models; a window then extends to both sides.
    is_bidirectional: bool = False
    unused_tokens: tuple[int, ...] = ()  # tokens that are never sampled: their logits are the lowest float32

    @property
    def layers(self) -> tuple[AttentionHeads, ...]:
        """The heads of each attention layer."""
        return tuple(operation.heads for operation in self.operations if type(operation) is AttendPaged)

    @property
    def heads(self) -> AttentionHeads:
        """The attention heads of the first layer. Other layers may have other heads, see `layers`."""
        return self.layers[0]

    @property
    def state_size(self) -> int:
        """The number of float32 values in the state of a sequence; 0: the model has no states."""
        return sum(map(prod, state_shapes(self.operations).values()))

    @property
    def has_sinks(self) -> bool:
        """Whether any attention layer has attention sinks."""
        return any(type(operation) is AttendPaged and operation.sinks is not None for operation in self.operations)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The settings of rotary position embedding for each layer. The entry is None for a layer without rotary
        position embedding."""
        return tuple(operation.rope for operation in self.operations if type(operation) is QkNormRopeStore)

    @property
    def rope(self) -> RopeConfig | None:
        """The settings of rotary position embedding of the first layer that has them. The value is None if no layer
        rotates its heads."""
        return next((rope for rope in self.ropes if rope is not None), None)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return head_of(self.operations).parts[0].rows.whole

    @property
    def hidden_size(self) -> int:
        """The width of hidden states."""
        return head_of(self.operations).in_size

    def of_rank(self, rank: int, num_ranks: int) -> "Network":
        """Return the part of the model that the tensor-parallel rank `rank` of `num_ranks` computes. Raises ValueError
        if the model cannot be split among `num_ranks` ranks."""
        return replace(self, operations=cut(self.operations, rank, num_ranks))

    def serving(self, max_model_len: int | None) -> "Network":
        """Return the model for a service whose sequences have at most `max_model_len` tokens. If `max_model_len` is
        None, the limit is the model's own number of positions. LongRoPE uses its short or its long factors depending on
        this limit."""
        served = self.max_position_embeddings if max_model_len is None else max_model_len
        return replace(self, operations=with_ropes(self.operations, lambda rope: rope.serving(served)))
