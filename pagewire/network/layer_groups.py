"""The layer groups of a model: which layers share block tables and the blocks of the KV cache.

All blocks have the same size, so that any free block can serve any group. A block holds the keys and values of the
layers of one group. Layers are of the same kind if they have the same window, KV heads and head size. The rule:

1. A window that covers the longest sequence counts as no window, as do all windows of a bidirectional model.
2. If a block can hold j layers of a kind, the kind's layers are divided into groups of j. The last may be smaller.
3. A sequence needs blocks of each group for its whole length, or for the group's window.
4. Candidates for the size of a block are the sizes of 1, 2, 3, ... layers of each kind.
5. Of the candidates with which a sequence of the maximum length needs at most 5 % more memory than with the best one,
   the rule takes a candidate with the fewest groups. Ties: less memory, then smaller blocks.

Gemma 3 1B has 4 layers without a window and 22 with a window of 512. A block holds 4 layers, so there are 1 + 6 groups.
gpt-oss-20b has 12 layers of each kind. A block holds 12 layers, so there are 2 groups. If all layers are alike, there
is one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.network.operations import AttentionHeads

_MAX_COST = 1.05  # of the lowest cost


@dataclass(frozen=True, slots=True)
class LayersOfGroup:
    """Layers that share block tables. `window` is the number of positions that their queries attend to; 0: all."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of the same window, KV heads and head size. `size` is the number of values of a key in one layer."""

    window: int
    size: int
    layers: tuple[int, ...]

    def num_groups(self, block: int) -> int:
        """Return the number of groups if a block has room for `block` values per position, or 0 if no layer fits."""
        num_together = block // self.size
        return num_together and -(-len(self.layers) // num_together)

    def groups(self, block: int) -> list[LayersOfGroup]:
        num_together = block // self.size
        starts = range(0, len(self.layers), num_together)
        return [LayersOfGroup(self.window, self.layers[start : start + num_together]) for start in starts]


def layer_groups(
    layers: Sequence[AttentionHeads], max_model_len: int, *, is_bidirectional: bool = False
) -> tuple[LayersOfGroup, ...]:
    """Divide the layers of a model into groups by the rule above. Groups without a window come first, then groups in
    the order of decreasing windows.

    Args:
        layers: the attention heads of each layer, of the whole model or of one tensor-parallel rank.
        max_model_len: the maximum number of tokens of a sequence.
        is_bidirectional: whether queries attend to later positions, too.
    """
    kinds = _kinds(layers, 0 if is_bidirectional else max_model_len)

    def cost_of(block: int) -> int:
        return sum(kind.num_groups(block) * block * (kind.window or max_model_len) for kind in kinds)

    blocks = {count * kind.size for kind in kinds for count in range(1, len(kind.layers) + 1)}
    costs = {block: cost_of(block) for block in blocks if all(kind.num_groups(block) for kind in kinds)}
    limit = _MAX_COST * min(costs.values())
    _, _, best = min(
        (sum(kind.num_groups(block) for kind in kinds), cost, block) for block, cost in costs.items() if cost <= limit
    )
    return tuple(group for kind in kinds for group in kind.groups(best))


def group_of_layer(groups: Sequence[LayersOfGroup]) -> tuple[int, ...]:
    """Return the number of the group of each layer."""
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return tuple(numbers[layer] for layer in range(len(numbers)))


def _kinds(layers: Sequence[AttentionHeads], max_window: int) -> list[_Kind]:
    """Return the kinds of layers in the order of their groups. Windows of `max_window` or more count as no window."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for layer, heads in enumerate(layers):
        window = heads.window if heads.window < max_window else 0
        places.setdefault((window, heads.num_kv_heads, heads.head_dim), []).append(layer)
    kinds = [_Kind(window, heads * size, tuple(found)) for (window, heads, size), found in places.items()]
    return sorted(kinds, key=lambda kind: -kind.window if kind.window else float("-inf"))
