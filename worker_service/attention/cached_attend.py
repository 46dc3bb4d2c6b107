"""Attention on a GPU: keys and values are written first, by a launch of their own or by that which turns the heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels.arguments import LayerCache
from pagewire.kernels.triton.cache import reshape_and_cache
from pagewire.kernels.triton.fused import HeadCaching


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """An `Attend` whose two halves may be called one by one. A cache of 8-bit floats has scales of 1."""

    kv_cache: Sequence[LayerCache]
    caching: HeadCaching  # of the step's tokens
    # (layer, query [T, num_heads, head_dim], sinks of the layer) -> the shape of the query; the cache holds the step's
    # keys and values already.
    attend_cached: Callable[[int, Tensor, Tensor | None], Tensor]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `Attend`."""
        reshape_and_cache(key, value, *self.kv_cache[layer], self.caching.slot_mapping)
        return self.attend_cached(layer, query, sinks)
