"""A model as the files of a checkpoint describe it."""

from dataclasses import dataclass, replace

from pagewire.network.operations import (
    AttendPaged,
    AttentionHeads,
    Listing,
    QkNormRopeStore,
    head_of,
)
from pagewire.network.quantization import Quantization
from pagewire.network.rewrites import cut, with_ropes
from pagewire.network.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Network:
    """What a model computes, and what is said of all of it."""

    architecture: str
    operations: Listing
    max_position_embeddings: int  # positions the model can tell apart, rope scaling included
    tie_word_embeddings: bool  # unless the checkpoint has a head
    dtype: str  # the checkpoint's own; float32 where it names none
    quantization: Quantization | None = None  # of the checkpoint's weights
    ignored: str = ""  # pattern of names that this model has no place for, beside those of its family

    @property
    def layers(self) -> tuple[AttentionHeads, ...]:
        """The heads of each layer that attends."""
        return tuple(operation.heads for operation in self.operations if type(operation) is AttendPaged)

    @property
    def heads(self) -> AttentionHeads:
        """Those of the first layer, which all have but for their windows."""
        return self.layers[0]

    @property
    def has_sinks(self) -> bool:
        """Whether scores have sinks."""
        return any(type(operation) is AttendPaged and operation.sinks is not None for operation in self.operations)

    @property
    def sliding_window(self) -> int:
        """Positions that any layer attends to from a query, its own included; 0: all up to its own."""
        windows = [heads.window for heads in self.layers]
        return max(windows) if all(windows) else 0

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """How each layer turns heads by their position; None: it does not."""
        return tuple(operation.rope for operation in self.operations if type(operation) is QkNormRopeStore)

    @property
    def rope(self) -> RopeConfig | None:
        """That of the first layer that has one; None: there is none."""
        return next((rope for rope in self.ropes if rope is not None), None)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return head_of(self.operations).parts[0].rows.whole

    @property
    def hidden_size(self) -> int:
        """The width of hidden states."""
        return head_of(self.operations).in_size

    def of_rank(self, rank: int, num_ranks: int) -> "Network":
        """Return what one of several ranks computes. Raises ValueError if the model cannot be shared out so."""
        return replace(self, operations=cut(self.operations, rank, num_ranks))

    def serving(self, max_model_len: int | None) -> "Network":
        """Return the model where no sequence is longer than that, or than its positions."""
        served = self.max_position_embeddings if max_model_len is None else max_model_len
        return replace(self, operations=with_ropes(self.operations, lambda rope: rope.serving(served)))
