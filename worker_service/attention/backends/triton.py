"""Paged attention by the Triton kernels, which compute any mix of rows straight from the blocks.

A CUDA graph can contain every operation here. Grids and the choice of kernels depend only on shapes and on upper bounds
that the host knows. The device reads the actual lengths of the rows.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache
from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.triton.attention_arguments import AlikeLayers, paged_caches
from pagewire.kernels.triton.cache import BLOCK_SIZES, HEAD_DIMS, reshape_and_cache
from pagewire.kernels.triton.decode_attention import ANY_LEN, PROGRAMS_PER_PROCESSOR, SplitPlan, prefers_splits
from pagewire.kernels.triton.fused import HeadCaching
from pagewire.kernels.triton.launching import RepeatedLaunch, Strided
from pagewire.kernels.triton.paged_attention import PagedAttention
from pagewire.kernels.triton.tiles import max_groups
from pagewire.network.operations import AttentionHeads
from worker_service.attention.backend import AttentionBatch, AttentionShape, Capability, DeviceRows
from worker_service.models.torch_operations import Attend

_CAPABILITY = Capability(
    backend="triton",
    device_types=("cuda",),
    compute_capability=(8, 0),
    cache_dtypes=(torch.float8_e4m3fn,),
    cache_compute_capability=(8, 9),  # the lowest version for which Triton converts float8_e4m3fn
    head_dims=HEAD_DIMS,
    max_groups=max_groups,
    block_sizes=BLOCK_SIZES,
)


def create(device: torch.device, shape: AttentionShape, kernels: CpuKernels | None) -> "TritonAttention":
    """Return the attention backend that uses Triton kernels. Raises UnavailableError if it does not support `shape`.

    The error is also raised if the GPU is too old, or if `device` is not a GPU.
    """
    _CAPABILITY.check(shape, device)
    return TritonAttention(shape, torch.cuda.get_device_properties(device).multi_processor_count, device)


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """The attention function of one prepared step on a GPU: write keys and values to the KV cache, then attend.

    Both parts can also be called separately, because the kernel that rotates the heads (RoPE) can also write the cache.
    A KV cache of 8-bit floats stores keys and values unscaled (scale 1).
    """

    kv_cache: Sequence[LayerCache]
    cachings: Sequence[HeadCaching]  # [num_layers], for the step's tokens
    # (layer, query [T, num_heads, head_dim], sinks of the layer) -> output of the query's shape. The cache must already
    # hold the step's keys and values.
    attend_cached: Callable[[int, Tensor, Tensor | None], Tensor]

    @staticmethod
    def of(
        kv_cache: Sequence[LayerCache],
        group_of_layer: Sequence[int],
        slot_mapping: Tensor,
        attend_cached: Callable[[int, Tensor, Tensor | None], Tensor],
    ) -> "CachedAttend":
        """Return the attention function of a step.

        `group_of_layer` is the layer group of each layer. `slot_mapping` [G, T] is the one of the step's
        `AttentionBatch`.
        """
        launches: dict[Hashable, RepeatedLaunch] = {}
        of_groups = [HeadCaching(slots, launches) for slots in slot_mapping.unbind()]
        return CachedAttend(kv_cache, [of_groups[group] for group in group_of_layer], attend_cached)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Compute the attention of one layer and return the output in the shape of `query`. See `Attend`."""
        reshape_and_cache(key, value, *self.kv_cache[layer], self.cachings[layer].slot_mapping)
        return self.attend_cached(layer, query, sinks)


class TritonAttention:
    """The attention backend for GPUs, by Triton kernels. A KV cache of 8-bit floats stores keys and values unscaled."""

    name = "triton"
    is_head_major = False
    is_capturable = True
    is_mixed_capturable = True

    def __init__(self, shape: AttentionShape, num_processors: int, device: torch.device) -> None:
        """Create the backend. `num_processors` is the GPU's number of multiprocessors (`multi_processor_count`)."""
        self._shape = shape
        self._scorings = shape.scorings(device)  # one per layer
        # The layer group of each layer, and the first layer with the same heads.
        self._layers = [
            (group, shape.layers.index(heads)) for group, heads in zip(shape.group_of_layer, shape.layers, strict=True)
        ]
        self._num_processors = num_processors
        # By window and sizes of heads, each for the most rows of any step until now.
        self._plans: dict[tuple[int, ...], SplitPlan] = {}
        # The first layer's keys in the last step. The reference is weak because the memory profile runs with a
        # temporary cache, which must be freed before the real cache is allocated.
        self._first_cache: weakref.ReferenceType[Tensor] | None = None
        self._strides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Prepare the attention of one step: choose kernels, and decide whether several GPU programs share a sequence.

        The decision is made once for all layers with the same heads. Layers of one layer group with the same heads
        share the kernels' other arguments, too. See `AttentionBackend.prepare`.
        """
        strides = self._strides_of(kv_cache)
        device = kv_cache[0][0].device
        rows = batch.rows_on(device)
        block_tables = batch.block_tables.to(torch.int32).unbind()
        num_blocks = kv_cache[0][0].shape[0]
        # If only the device knows which rows decode, any row may decode. The other rows have length 0 for that kernel.
        decode_lens, prefill_lens = rows.seq_lens[: rows.num_decodes], None
        if rows.num_decodes is None:
            decode_lens, prefill_lens = _split_lengths(rows)
        shared = {}
        for layer in dict.fromkeys(first for _, first in self._layers):
            heads = self._shape.layers[layer]
            query_shape = (batch.slot_mapping.shape[1], heads.num_heads, heads.head_dim)
            caches, scoring = paged_caches(*kv_cache[layer]), self._scorings[layer]
            plan = self._plan(batch, decode_lens, heads, num_blocks, device)
            shared[layer] = AlikeLayers.of(query_shape, self._shape.dtype, caches, scoring), plan
        attentions = {}
        for layer_group, first in dict.fromkeys(self._layers):
            (layers, plan), tables = shared[first], block_tables[layer_group]
            if prefill_lens is None:
                split = (len(decode_lens), plan)
                attention = PagedAttention.of(layers, tables, rows.seq_lens, rows.query_start_loc, *split)
            else:
                lengths = (decode_lens, prefill_lens, rows.query_start_loc)
                attention = PagedAttention.of_any_rows(layers, tables, *lengths, plan)
            attentions[layer_group, first] = attention
        of_layers = [attentions[key] for key in self._layers]

        def attend(layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
            caches = Strided(kv_cache[layer][0], strides[layer][0]), Strided(kv_cache[layer][1], strides[layer][1])
            return of_layers[layer].attend(query, caches, sinks)

        return CachedAttend.of(kv_cache, self._shape.group_of_layer, batch.slot_mapping, attend)

    def _strides_of(self, kv_cache: Sequence[LayerCache]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the strides of each layer's key cache and value cache.

        A worker uses the same KV cache in all of its steps. The strides are computed and checked only when the cache is
        new.
        """
        if self._first_cache is None or self._first_cache() is not kv_cache[0][0]:
            caches = [paged_caches(*layer) for layer in kv_cache]
            self._strides = [(keys.strides, values.strides) for keys, values in caches]
            self._first_cache = weakref.ref(kv_cache[0][0])
        return self._strides

    def _plan(
        self, batch: AttentionBatch, decode_lens: Tensor, heads: AttentionHeads, num_blocks: int, device: torch.device
    ) -> SplitPlan | None:
        """Decide how GPU programs share the attention of decoding sequences, in layers with these heads.

        Return a plan that divides the positions of each sequence among programs. Return None if that would not be
        faster. `decode_lens` are the lengths of the sequences.
        """
        max_positions = heads.window or ANY_LEN
        lengths = [min(length, max_positions) for length in batch.seq_lens[: len(decode_lens)]]
        # The upper bounds of a graph's rows may add up to more than the cache can hold.
        num_positions = min(sum(lengths), num_blocks * self._shape.block_size)
        longest = max(lengths, default=0)
        if not prefers_splits(len(lengths), heads.num_kv_heads, num_positions, longest, self._num_processors):
            return None
        plan = self._allocate(len(decode_lens), heads, device)
        plan.decide(decode_lens, max_positions)
        return plan

    def _allocate(self, num_rows: int, heads: AttentionHeads, device: torch.device) -> SplitPlan:
        """Return memory for a split plan, which divides the positions of decoding sequences among GPU programs.

        Steps without a CUDA graph share one allocation per window and sizes of heads. A captured CUDA graph gets its
        own allocation, which lasts while the graph can be replayed.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._new_plan(num_rows, heads, device)
        key = (heads.window, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        plan = self._plans.get(key)
        if plan is None or plan.num_rows < num_rows:
            plan = self._plans[key] = self._new_plan(num_rows, heads, device)
        return plan.of_first(num_rows)

    def _new_plan(self, num_rows: int, heads: AttentionHeads, device: torch.device) -> SplitPlan:
        num_programs = PROGRAMS_PER_PROCESSOR * self._num_processors
        return SplitPlan.allocate(num_rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, device, num_programs)


def _split_lengths(rows: DeviceRows) -> tuple[Tensor, Tensor]:
    """Return the lengths of a step's sequences as two tensors [S] int32: for the decode kernel and the prefill kernel.

    `PagedAttention.of_any_rows` expects these tensors. Sequence i decodes if its tokens start at offset i of the batch
    and it has exactly one new token. The decode length of any other sequence is 0. The prefill length of a sequence
    that decodes is -1.
    """
    starts, ends = rows.query_start_loc[:-1], rows.query_start_loc[1:]
    places = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    is_decoding = (starts == places) & (ends == places + 1)
    return rows.seq_lens.masked_fill(~is_decoding, 0), rows.seq_lens.masked_fill(is_decoding, -1)
