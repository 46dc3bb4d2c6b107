"""The interface between the worker and its attention backends, what each can compute, and why it refuses the rest.

A backend alone knows its kernels and how it reads the paged KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Protocol

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from worker_service.models.torch_operations import Attend

ANY = range(1, 1 << 16)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shapes and features of the attention that a backend must compute. `create_backend` refuses what it cannot."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries, fresh keys and values, and outputs
    cache_dtype: torch.dtype  # of the KV cache
    windows: tuple[int, ...]  # [num_layers] positions a query attends to, its own included; 0: all up to its own
    scale: float | None = None  # of the products of queries and keys; None: head_dim ** -0.5
    softcap: float = 0.0  # bounds scores to softcap * tanh(score / softcap); 0: leaves them as they are
    alibi_slopes: tuple[float, ...] = ()  # [num_heads], of `Scoring`; none: scores fall by no distance
    has_sinks: bool = False  # layers pass `Scoring.sinks`

    def scoring(self, window: int, device: torch.device) -> Scoring:
        """Return how layers of this window score, but for their sinks."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        slopes = torch.tensor(self.alibi_slopes, device=device) if self.alibi_slopes else None
        return Scoring(scale, window, slopes, self.softcap)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The tensors from which kernels on a GPU read a step's rows, so that a CUDA graph can hold the step.

    Behind a graph the numbers of `AttentionBatch` that the host knows are the most that any of its steps has.
    """

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32; 0: a row of padding, which attends to nothing
    # Rows that have one token each and come first; None, behind a graph of any mix of rows: the device alone knows.
    # Then query_start_loc of the batch is empty, and a row without tokens is padding too.
    num_decodes: int | None

    @staticmethod
    def of(query_start_loc: Sequence[int], seq_lens: Sequence[int], device: torch.device) -> "DeviceRows":
        """Copies what the host knows to the device, for callers that do not keep it there."""
        lengths = (end - start for start, end in pairwise(query_start_loc))
        return DeviceRows(
            torch.tensor(query_start_loc, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            sum(1 for _ in takewhile(lambda length: length == 1, lengths)),
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's S rows over one flat batch of T tokens. A row's tokens are the last of its positions."""

    query_start_loc: list[int]  # [S + 1] offsets of each row's tokens in the flat batch; every row has at least one
    seq_lens: list[int]  # [S] positions of each row after this step
    block_tables: Tensor  # [S, max_blocks] int32 or int64, padded with block 0
    slot_mapping: Tensor  # [T] int64: block_id * block_size + offset of each token; -1, on a GPU only: it is not kept
    device_rows: DeviceRows | None = None  # on a GPU

    def rows_on(self, device: torch.device) -> DeviceRows:
        """`device_rows`, or what they would be, copied to `device`: no graph can hold that."""
        return self.device_rows or DeviceRows.of(self.query_start_loc, self.seq_lens, device)


class AttentionBackend(Protocol):
    """Does once a step what all layers share, and returns what each layer calls."""

    name: str
    is_head_major: bool  # how it wants a block to lie: each KV head's positions together, or each position's heads
    is_capturable: bool  # whether a graph can hold `prepare` and what it returns; batches then have `device_rows`
    is_mixed_capturable: bool  # also where the device alone knows which rows decode

    def prepare(self, batch: AttentionBatch, kv_cache: Sequence[LayerCache]) -> Attend:
        """Prepares a step over `kv_cache`, one entry per layer.

        Cache positions outside the rows' own, and those before the window of a row's first query in every layer, may
        hold NaN; their blocks may be anyone's.

        What it returns writes the step's keys and values of a layer to the cache, then attends causally over the cache.
        All writes come before all reads, so a row may read blocks that another row of the step fills. Layers count from
        0; the query is not yet scaled.
        """


class UnavailableError(ValueError):
    """A backend cannot compute what it is asked for. The text names flag, value and remedy."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Values that a backend takes. Every backend takes any window in any layer, any soft cap, and slopes."""

    backend: str
    device_types: tuple[str, ...]
    compute_capability: tuple[int, int] = (0, 0)  # of a GPU, at least
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    cache_dtypes: tuple[torch.dtype, ...] = ()  # besides the dtype that it computes in
    cache_compute_capability: tuple[int, int] = (0, 0)  # of a GPU that reads these, at least
    head_dims: range = ANY
    max_groups: int = ANY.stop  # query heads that share a KV head
    block_sizes: range = ANY
    takes_sinks: bool = True

    def check(self, shape: AttentionShape, device: torch.device) -> None:
        """Raises UnavailableError with the first thing that the backend cannot do."""
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
        if shape.head_dim not in self.head_dims:
            raise self._error(
                f"computes heads of {_describe(self.head_dims)}, and the model's are {shape.head_dim}",
                other=_in_torch(shape, device),
            )
        num_groups = shape.num_heads // shape.num_kv_heads
        if num_groups > self.max_groups:
            raise self._error(
                f"lets at most {self.max_groups} query heads share a KV head, and in the model {num_groups} do",
                other=_in_torch(shape, device),
            )
        if shape.block_size not in self.block_sizes:
            raise self._error(
                f"reads blocks of {_describe(self.block_sizes)} positions, and --block-size is {shape.block_size}",
                f"use --block-size {self.block_sizes.start}",
            )
        if shape.has_sinks and not self.takes_sinks:
            raise self._error("knows no sinks, which the model's layers have")
        if device.type == "cuda":
            self._check_gpu(shape, device)

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
    """What to do about heads that a backend does not take: torch takes all, on a GPU over a cache of its dtype."""
    is_quantized = device.type == "cuda" and shape.cache_dtype != shape.dtype
    return "use --attention-backend torch" + (" with --kv-cache-dtype auto" if is_quantized else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(numbers: range) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    bounds = f"{numbers[0]} to {numbers[-1]}"
    return bounds if numbers.step == 1 else f"{bounds} in steps of {numbers.step}"
