"""One step's flat tensors: the working rows' new tokens one row after the other, in slot order."""

from dataclasses import dataclass

import numpy as np
import torch

from pagewire.kernels.cpu import CpuKernels, TableFlattener
from worker_service.attention import AttentionBatch
from worker_service.rows import SequenceTable, WorkingRows


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T new tokens of S rows, R of which sample."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: AttentionBatch
    sampling_indices: torch.Tensor  # [R] int64: where in the flat batch the sampling rows' last tokens are


class BatchBuilder:
    """Flattens working rows of a table. What it gives is overwritten when it is called again."""

    def __init__(self, table: SequenceTable, kernels: CpuKernels | None) -> None:
        """`kernels`: that flatten rows in one call; None: numpy does."""
        self._table = table
        self._flattener: TableFlattener | None = None
        if kernels is not None:
            block_size = table.limits.block_size
            self._flattener = TableFlattener(kernels.library, table.token_ids, table.block_tables, block_size)

    def build(self, rows: WorkingRows) -> HostBatch:
        """There must be at least one row."""
        if self._flattener is None:
            return _build(self._table, rows)
        ends = rows.ends
        num_blocks = -(-int(ends.max()) // self._table.limits.block_size)
        flat = self._flattener.flatten(rows.slots, rows.starts, rows.num_new_tokens, rows.samples, num_blocks)
        paged = flat.paged
        attention = AttentionBatch(
            query_start_loc=paged.query_start_loc.tolist(),
            seq_lens=ends.tolist(),
            block_tables=paged.block_tables,
            slot_mapping=paged.slot_mapping,
            paged_rows=paged,
        )
        return HostBatch(flat.token_ids, flat.positions, attention, flat.sampling_indices)


def _build(table: SequenceTable, rows: WorkingRows) -> HostBatch:
    block_size = table.limits.block_size
    slots, positions, query_start_loc = rows.flatten()
    block_ids = table.block_tables[slots, positions // block_size].astype(np.int64)
    ends = rows.ends
    num_blocks = -(-int(ends.max()) // block_size)
    return HostBatch(
        token_ids=torch.from_numpy(table.token_ids[slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_start_loc=query_start_loc.tolist(),
            seq_lens=ends.tolist(),
            block_tables=torch.from_numpy(table.block_tables[rows.slots, :num_blocks]),
            slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size),
        ),
        sampling_indices=torch.from_numpy(query_start_loc[1:][rows.samples] - 1),
    )
