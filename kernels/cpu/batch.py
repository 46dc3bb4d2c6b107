"""A step's flat tensors, taken from a table of rows in one call."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.cpu.paged import PagedRows

_INPUTS = (("slots", np.int64), ("starts", np.int64), ("num_new_tokens", np.int64), ("samples", np.bool_))


class _TableBatch(ctypes.Structure):
    """Mirrors `table_batch` of source/batch.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "block_tables")),
        *((name, ctypes.c_int64) for name in ("token_stride", "block_stride", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_rows", "max_blocks")),
        *((name, ctypes.c_void_p) for name, _ in _INPUTS),
        *((name, ctypes.c_void_p) for name in ("flat_token_ids", "positions", "slot_mapping", "sampling_indices")),
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "flat_tables")),
    )


@dataclass(frozen=True, slots=True)
class FlatRows:
    """T new tokens of S rows, R of which sample."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    paged: PagedRows
    sampling_indices: Tensor  # [R] int64: where the sampling rows' last tokens are


class TableFlattener:
    """Flattens rows of a table, always into the same memory: what it returned before is overwritten."""

    def __init__(
        self, library: ctypes.CDLL, token_ids: NDArray[np.int32], block_tables: NDArray[np.int32], block_size: int
    ) -> None:
        """
        Args:
            token_ids: [num_slots, any], read at each call.
            block_tables: [num_slots, max_num_blocks], read at each call.

        Raises:
            ValueError: they are not dense arrays of int32 with a line for each slot.
        """
        num_slots = len(token_ids)
        for name, array in (("token_ids", token_ids), ("block_tables", block_tables)):
            if array.dtype != np.int32 or array.ndim != 2 or len(array) != num_slots or not array.flags.c_contiguous:
                raise ValueError(f"{name} is {array.dtype} {array.shape}; make it int32 [{num_slots}, any], dense")
        self._tables = token_ids, block_tables  # whose memory the batch names
        self._flatten = library.flatten_rows
        self._flatten.argtypes, self._flatten.restype = [ctypes.c_void_p], ctypes.c_int64
        self._inputs = [np.zeros(num_slots, dtype) for _, dtype in _INPUTS]
        self._batch = _TableBatch(
            token_ids=token_ids.ctypes.data,
            block_tables=block_tables.ctypes.data,
            token_stride=token_ids.shape[1],
            block_stride=block_tables.shape[1],
            block_size=block_size,
            **{name: array.ctypes.data for (name, _), array in zip(_INPUTS, self._inputs, strict=True)},
        )
        self._rows = torch.empty(num_slots, dtype=torch.int64)  # sampling indices
        self._batch.sampling_indices = self._rows.data_ptr()
        self._sizes: tuple[int, int, int] | None = None
        self._flat: FlatRows | None = None

    def flatten(
        self,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_new_tokens: NDArray[np.int64],
        samples: NDArray[np.bool_],
        num_blocks: int,
    ) -> FlatRows:
        """Row i is that of slots[i] and computes num_new_tokens[i] positions from starts[i] on.

        Args:
            slots, starts, num_new_tokens, samples: [S]; trusted.
            num_blocks: as many as the longest row's positions need; trusted.
        """
        num_rows = len(slots)
        sizes = int(num_new_tokens.sum()), num_rows, num_blocks
        flat = self._flat if sizes == self._sizes else None
        flat = flat or self._make_room(*sizes)
        for place, values in zip(self._inputs, (slots, starts, num_new_tokens, samples), strict=True):
            place[:num_rows] = values
        num_samples = self._flatten(ctypes.addressof(self._batch))
        if num_samples != len(flat.sampling_indices):
            flat = FlatRows(flat.token_ids, flat.positions, flat.paged, self._rows[:num_samples])
            self._flat = flat
        return flat

    def _make_room(self, num_tokens: int, num_rows: int, num_blocks: int) -> FlatRows:
        token_ids, positions, slot_mapping = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(3))
        paged = PagedRows(
            torch.empty(num_rows + 1, dtype=torch.int32),
            torch.empty(num_rows, dtype=torch.int32),
            torch.empty(num_rows, num_blocks, dtype=torch.int32),
            slot_mapping,
        )
        batch = self._batch
        batch.num_rows, batch.max_blocks = num_rows, num_blocks
        batch.flat_token_ids, batch.positions = token_ids.data_ptr(), positions.data_ptr()
        batch.slot_mapping, batch.flat_tables = slot_mapping.data_ptr(), paged.block_tables.data_ptr()
        batch.query_start_loc, batch.seq_lens = paged.query_start_loc.data_ptr(), paged.seq_lens.data_ptr()
        self._sizes = num_tokens, num_rows, num_blocks
        self._flat = FlatRows(token_ids, positions, paged, self._rows[:0])
        return self._flat
