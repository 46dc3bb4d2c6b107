"""A step's inputs on a device: what the host sends of them, and what is gathered there."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_service.attention import AttentionBatch, DeviceRows
from worker_service.device.staging import Upload
from worker_service.device.table import DeviceTable
from worker_service.rows import WorkingRows


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """T new tokens of S rows on a device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """A step's rows on the host, those with one token each first, and their tokens in that order.

    Attributes:
        query_start_loc: [S + 1], where each row's tokens begin.
        token_slots, token_lengths: [T], of each token its row, and the tokens of that up to it and with it.
        token_starts: [S] where each row's tokens lie in the flat batch, in slot order.
        sampling_indices: [R], of the last tokens of the rows that sample, in slot order.
    """

    rows: WorkingRows
    query_start_loc: NDArray[np.int64]
    token_slots: NDArray[np.int64]
    token_lengths: NDArray[np.int64]
    token_starts: NDArray[np.int64]
    sampling_indices: NDArray[np.int64]

    @staticmethod
    def of(rows: WorkingRows) -> "OrderedRows":
        order = np.argsort(rows.num_new_tokens != 1, kind="stable")
        ordered = rows.take(order)
        token_slots, positions, query_start_loc = ordered.flatten()
        token_starts = np.empty_like(rows.slots)
        token_starts[order] = query_start_loc[:-1]
        last_tokens = token_starts + rows.num_new_tokens - 1
        columns = (query_start_loc, token_slots, positions + 1)
        return OrderedRows(ordered, *columns, token_starts, last_tokens[rows.samples])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Any mix of rows, those with one token each first: where they lie in the step's packed upload."""

    row_slots: slice  # [S]
    seq_lens: slice  # [S]
    query_start_loc: slice  # [S + 1]
    token_slots: slice  # [T]
    token_lengths: slice  # [T], of its row up to each token and with it
    sampling_indices: slice  # [R], of the last tokens of the rows that sample, in slot order
    num_decodes: int
    host_query_start_loc: list[int]
    host_seq_lens: list[int]
    token_starts: NDArray[np.int64]  # [S] where each row's tokens lie in the flat batch, in slot order
    block_size: int

    @staticmethod
    def of(rows: WorkingRows, block_size: int, upload: Upload) -> "StepInputs":
        """Return the inputs of a step of at least one row, and add to `upload` what the device needs of them."""
        ordered = OrderedRows.of(rows)
        return StepInputs(
            row_slots=upload.add(ordered.rows.slots),
            seq_lens=upload.add(ordered.rows.ends),
            query_start_loc=upload.add(ordered.query_start_loc),
            token_slots=upload.add(ordered.token_slots),
            token_lengths=upload.add(ordered.token_lengths),
            sampling_indices=upload.add(ordered.sampling_indices),
            num_decodes=int((ordered.rows.num_new_tokens == 1).sum()),
            host_query_start_loc=ordered.query_start_loc.tolist(),
            host_seq_lens=ordered.rows.ends.tolist(),
            token_starts=ordered.token_starts,
            block_size=block_size,
        )

    def gather(self, packed: Tensor, table: DeviceTable) -> DeviceBatch:
        num_blocks = -(-max(self.host_seq_lens) // self.block_size)
        columns = (packed[self.token_slots], packed[self.token_lengths], packed[self.row_slots])
        tokens = table.tokens(*columns, num_blocks)
        attention = AttentionBatch(
            query_start_loc=self.host_query_start_loc,
            seq_lens=self.host_seq_lens,
            block_tables=tokens.block_tables,
            slot_mapping=tokens.slot_mapping,
            device_rows=DeviceRows(packed[self.query_start_loc], packed[self.seq_lens], self.num_decodes),
        )
        return DeviceBatch(tokens.token_ids, tokens.positions, attention)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A batch of rows that compute one token each, as a graph reads it.

    Attributes:
        slots: [S] int32; rows of padding have the scratch slot.
        seq_lens: [S] int32; 0 for rows of padding.
        query_start_loc: [S + 1] int32: 0, 1, 2, ...
        max_seq_len: the most that any step's rows have.
    """

    slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_seq_len: int
    block_size: int

    def gather(self, table: DeviceTable) -> DeviceBatch:
        num_rows = len(self.slots)
        tokens = table.tokens(self.slots, self.seq_lens, self.slots)
        attention = AttentionBatch(
            query_start_loc=list(range(num_rows + 1)),
            seq_lens=[self.max_seq_len] * num_rows,
            block_tables=tokens.block_tables,
            slot_mapping=tokens.slot_mapping,
            device_rows=DeviceRows(self.query_start_loc, self.seq_lens, num_rows),
        )
        return DeviceBatch(tokens.token_ids, tokens.positions, attention)
