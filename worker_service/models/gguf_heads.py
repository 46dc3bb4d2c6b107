"""The order in which GGUF files store the value heads of the gated delta rule.

Several value heads use the same query and key head. Checkpoint directories store these value heads next to each other.
GGUF files of some architectures store them in the order in which ggml repeats key heads: head h uses key head h %
num_key_heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pagewire.kernels.weight import StoredFormat, StoredWeight

# Tensors whose rows follow the rows of queries and keys, tensors with a row for each value, tensors with a row for each
# head, and tensors with a column for each value.
_PARTS = re.compile(r"blk\.\d+\.(?:(attn_qkv|ssm_conv1d)|(attn_gate)|(ssm_(?:alpha|beta|a|dt))|(ssm_out))(?:\.\w+)?")
_AFTER_KEYS, _VALUES, _HEADS, _COLUMNS = range(1, 5)


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """The numbers of key and value heads of a model, and the number of values of each head."""

    num_key_heads: int
    num_heads: int
    head_dim: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> "HeadTiles | None":
        """Return the heads that a config.json describes, or None if each key head has one value head: then both orders
        are equal."""
        num_key_heads, num_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        return (
            None if num_key_heads == num_heads else HeadTiles(num_key_heads, num_heads, config["linear_key_head_dim"])
        )

    def unit(self, own_name: str) -> int:
        """Return how many rows of a tensor are stored together, or 0 if the tensor has no rows of value heads."""
        return {_AFTER_KEYS: self.head_dim, _VALUES: self.head_dim, _HEADS: 1}.get(_kind(own_name), 0)

    def stored_row(self, own_name: str, row: int) -> int:
        """Return the file's row for a row of the checkpoint's tensor."""
        unit, first = self.unit(own_name), 0
        if _kind(own_name) == _AFTER_KEYS:
            first = 2 * self.num_key_heads * self.head_dim
        if not unit or row < first:
            return row
        head, place = divmod(row - first, unit)
        key_head, number = divmod(head, self.num_heads // self.num_key_heads)
        return first + (number * self.num_key_heads + key_head) * unit + place

    def format(self, own_name: str, stored: StoredFormat | None) -> StoredFormat | None:
        """Return the format in which a weight can be kept in memory, from the file's format. Return None if groups of
        inputs that share a scale contain several heads."""
        if stored is None or not stored.group_size or _kind(own_name) != _COLUMNS:
            return stored
        return None if self.head_dim % stored.group_size else replace(stored, has_factors=False)

    def with_columns(self, own_name: str, weight: StoredWeight) -> StoredWeight:
        """Reorder the columns of rows of a tensor, if they belong to value heads. The represented values are those of
        the file."""
        if _kind(own_name) != _COLUMNS:
            return weight
        if weight.scale is None or self.head_dim % weight.group_size:
            return StoredWeight(self._grouped(weight.values if weight.scale is None else weight.dequantized()))
        whole = weight.without_factors()  # because blocks of 256 inputs contain values of several heads
        return replace(whole, **{name: self._grouped(part) for name, part in whole.parts().items()})  # type: ignore[arg-type]

    def _grouped(self, columns: Tensor) -> Tensor:
        tiles = columns.unflatten(1, (self.num_heads // self.num_key_heads, self.num_key_heads, -1))
        return tiles.swapaxes(1, 2).flatten(1)


def _kind(own_name: str) -> int:
    """Return the number of the matching group of _PARTS, or 0."""
    match = _PARTS.fullmatch(own_name)
    return 0 if match is None or match.lastindex is None else match.lastindex
