"""The interface between the worker and its attention backends, and the check of each backend's capabilities.

Only a backend knows its kernels and the layout in which it reads the paged KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.network.operations import AttentionHeads
from worker_service.models.torch_operations import Attend

ANY = range(1, 1 << 16)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads, dtypes and features of a model's attention, by which an attention backend is chosen.

    `create_backend` raises UnavailableError for a shape that the backend does not support.
    """

    layers: tuple[AttentionHeads, ...]  # [num_layers]; layers with equal heads share the preparation of a step
    block_size: int
    dtype: torch.dtype  # of queries, fresh keys and values, and outputs
    cache_dtype: torch.dtype  # of the KV cache
    has_sinks: bool = False  # whether layers pass `Scoring.sinks`
    is_bidirectional: bool = False  # whether queries attend to later positions, too; see `Scoring`
    layer_groups: tuple[int, ...] = ()  # [num_layers] the layer group of each layer; empty: all layers are in one group

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """The layer group of each layer, whose block tables and slot mapping the layer uses."""
        return self.layer_groups or (0,) * len(self.layers)

    def scorings(self, device: torch.device) -> list[Scoring]:
        """Return the scale, soft cap, ALiBi slopes, window and block pattern of each layer.

        Layers with equal heads have the same object. Attention sinks are not included, because each layer has its own.
        """
        by_heads = {heads: self._scoring(heads, device) for heads in dict.fromkeys(self.layers)}
        return [by_heads[heads] for heads in self.layers]

    def _scoring(self, heads: AttentionHeads, device: torch.device) -> Scoring:
        slopes = torch.tensor(heads.alibi_slopes, device=device) if heads.alibi_slopes else None
        scores = (heads.scale, heads.window, slopes, heads.softcap)
        return Scoring(*scores, is_bidirectional=self.is_bidirectional, pattern=heads.pattern)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """GPU tensors with the token offsets and the lengths of a step's sequences, for attention kernels.

    A row is the worker's state of one running sequence. A CUDA graph can contain kernels that read these tensors. If a
    graph contains the step, the numbers in `AttentionBatch` are upper bounds for all steps that replay the graph.
    """

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32; 0: a padding row, which attends to nothing
    # The number of leading rows that have one token each. None: the step belongs to a graph for any mix of rows, so
    # only the device knows the number. In that case `AttentionBatch.query_start_loc` is empty, and a row without tokens
    # is padding too.
    num_decodes: int | None

    @staticmethod
    def of(query_start_loc: Sequence[int], seq_lens: Sequence[int], device: torch.device) -> "DeviceRows":
        """Copy the token offsets and lengths of a step's sequences from host lists to `device`. Return the tensors."""
        lengths = (end - start for start, end in pairwise(query_start_loc))
        return DeviceRows(
            torch.tensor(query_start_loc, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            sum(1 for _ in takewhile(lambda length: length == 1, lengths)),
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The inputs of attention for one step: T new tokens of S sequences (rows), concatenated into one flat batch.

    The new tokens of a sequence are at its last positions.
    """

    query_start_loc: list[int]  # [S + 1] offset of each row's tokens in the flat batch; each row has at least one token
    seq_lens: list[int]  # [S] number of positions of each row after this step
    # [G, S, max_blocks] int32 or int64, the tables of each layer group, padded with block 0
    block_tables: Tensor
    # [G, T] int64: block_id * block_size + offset of each token; -1, on a GPU only: not written to the cache
    slot_mapping: Tensor
    device_rows: DeviceRows | None = None  # set on a GPU

    def rows_on(self, device: torch.device) -> DeviceRows:
        """Return GPU tensors with the token offsets and the lengths of the step's sequences.

        The result is `device_rows` if it is set. Otherwise new tensors are created on `device`. Creating them copies
        values from the host, which a CUDA graph cannot contain.
        """
        return self.device_rows or DeviceRows.of(self.query_start_loc, self.seq_lens, device)


class AttentionBackend(Protocol):
    """The interface of an implementation of attention over the paged KV cache, for example by Triton kernels.

    `prepare` does the work that all layers of a step share. It returns the function that each layer calls.
    """

    name: str
    is_head_major: bool  # whether a block stores each KV head's positions together, rather than each position's heads
    # whether a graph can contain `prepare` and the function it returns; batches then have `device_rows`
    is_capturable: bool
    is_mixed_capturable: bool  # the same for steps in which only the device knows which rows decode

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Prepare the attention of one step and return the function that each layer of the model calls.

        `kv_cache` has one entry per layer. The returned function writes a layer's new keys and values to the KV cache,
        then attends over the cache, causally unless the shape is bidirectional. All writes come before all reads, so a
        row may read blocks that another row of the same step fills. Layers count from 0. The query is not yet scaled.

        In each layer group, two kinds of cache positions may hold NaN: positions that belong to no row of the step, and
        positions before the window of a row's first query. Blocks at such positions may belong to other sequences.
        """


class UnavailableError(ValueError):
    """Raised if an attention backend cannot be used.

    The backend does not support the model or the device, or a package is missing. The message names the flag, its value
    and the remedy.
    """


@dataclass(frozen=True, slots=True)
class Capability:
    """The models and devices that an attention backend supports, such as its dtypes and head sizes.

    Every backend supports sliding windows, soft caps and ALiBi slopes, so these are not listed.
    """

    backend: str
    device_types: tuple[str, ...]
    compute_capability: tuple[int, int] = (0, 0)  # of a GPU, minimum
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    cache_dtypes: tuple[torch.dtype, ...] = ()  # besides the dtype that the backend computes in
    cache_compute_capability: tuple[int, int] = (0, 0)  # of a GPU that reads `cache_dtypes`, minimum
    head_dims: range = ANY
    # the maximum number of query heads of a size that share a KV head
    max_groups: Callable[[int], int] = lambda head_dim: ANY.stop
    block_sizes: range = ANY
    supports_sinks: bool = True
    supports_bidirectional: bool = False
    supports_patterns: bool = True

    def check(self, shape: AttentionShape, device: torch.device) -> None:
        """Raise UnavailableError if the attention backend does not support `shape` or `device`.

        The message names the first unsupported value.
        """
        if device.type not in self.device_types:
            kinds = " or ".join(self.device_types)
            raise self._error(f"computes on {kinds}, and --device is {device.type}", f"use --device {kinds}")
        if shape.dtype not in self.dtypes:
            names = " or ".join(map(_name, self.dtypes))
            raise self._error(f"computes in {names}, and --dtype is {_name(shape.dtype)}", f"use --dtype {names}")
        if shape.cache_dtype not in (shape.dtype, *self.cache_dtypes):
            caches = " or ".join(map(_name, (shape.dtype, *self.cache_dtypes)))
            raise self._error(
                f"reads a KV cache of {caches}, and --kv-cache-dtype asks for {_name(shape.cache_dtype)}",
                "use --kv-cache-dtype auto",
            )
        for heads in dict.fromkeys(shape.layers):
            self._check_heads(heads, _in_torch(shape, device))
        if shape.block_size not in self.block_sizes:
            raise self._error(
                f"reads blocks of {_describe(self.block_sizes)} positions, and --block-size is {shape.block_size}",
                f"use --block-size {self.block_sizes.start}",
            )
        if shape.has_sinks and not self.supports_sinks:
            raise self._error("does not support attention sinks, which the model uses")
        if shape.is_bidirectional and not self.supports_bidirectional:
            raise self._error("attends causally, and the model's tokens attend to later tokens, too", "use torch")
        if any(heads.pattern for heads in shape.layers) and not self.supports_patterns:
            raise self._error("does not support block-sparse attention, which the model uses")
        if device.type == "cuda":
            self._check_gpu(shape, device)

    def _check_heads(self, heads: AttentionHeads, other: str) -> None:
        if heads.head_dim not in self.head_dims:
            raise self._error(
                f"computes heads of {_describe(self.head_dims)}, and the model's are {heads.head_dim}", other=other
            )
        num_groups, max_groups = heads.num_heads // heads.num_kv_heads, self.max_groups(heads.head_dim)
        if num_groups > max_groups:
            raise self._error(
                f"supports at most {max_groups} query heads of {heads.head_dim} for each KV head, and the model has "
                f"{num_groups}",
                other=other,
            )

    def _check_gpu(self, shape: AttentionShape, device: torch.device) -> None:
        needed, what, remedy = self.compute_capability, "a GPU", ""
        if shape.cache_dtype != shape.dtype and needed < self.cache_compute_capability:
            needed, what = self.cache_compute_capability, f"for a KV cache of {_name(shape.cache_dtype)} a GPU"
            remedy = "use --kv-cache-dtype auto"
        actual = torch.cuda.get_device_capability(device) if any(needed) else needed
        if actual < needed:
            texts = [".".join(map(str, version)) for version in (needed, actual)]
            raise self._error(f"needs {what} of compute capability {texts[0]}, and this one has {texts[1]}", remedy)

    def _error(
        self, reason: str, remedy: str = "", other: str = "choose another --attention-backend"
    ) -> UnavailableError:
        return UnavailableError(
            f"attention backend {self.backend!r} {reason}: {remedy + ', or ' + other if remedy else other}"
        )


def _in_torch(shape: AttentionShape, device: torch.device) -> str:
    """Return the remedy for an error message about unsupported attention heads: use the torch backend.

    The torch backend supports all heads. On a GPU it needs a KV cache of the dtype in which it computes. If the cache
    has another dtype, the remedy names the flag that changes it.
    """
    is_quantized = device.type == "cuda" and shape.cache_dtype != shape.dtype
    return "use --attention-backend torch" + (" with --kv-cache-dtype auto" if is_quantized else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(numbers: range) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    bounds = f"{numbers[0]} to {numbers[-1]}"
    return bounds if numbers.step == 1 else f"{bounds} in steps of {numbers.step}"
