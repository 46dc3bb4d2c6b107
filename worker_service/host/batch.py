"""One step's flat tensors: the working rows' new tokens one row after the other, in slot order."""

import numpy as np
import torch

from pagewire.kernels.cpu import CpuKernels, FlatRows, PagedRows, TableFlattener
from worker_service.rows import SequenceTable, WorkingRows


class BatchBuilder:
    """Flattens working rows of a table. What it gives is overwritten when it is called again."""

    def __init__(self, table: SequenceTable, kernels: CpuKernels | None) -> None:
        """`kernels`: that flatten rows in one call; None: numpy does."""
        self._table = table
        self._flattener: TableFlattener | None = None
        if kernels is not None:
            block_size = table.limits.block_size
            self._flattener = TableFlattener(kernels.library, table.token_ids, table.block_tables, block_size)

    def build(self, rows: WorkingRows) -> FlatRows:
        """There must be at least one row."""
        num_blocks = -(-int(rows.ends.max()) // self._table.limits.block_size)
        if self._flattener is None:
            return _flatten(self._table, rows, num_blocks)
        return self._flattener.flatten(rows.slots, rows.starts, rows.num_new_tokens, rows.samples, num_blocks)


def _flatten(table: SequenceTable, rows: WorkingRows, num_blocks: int) -> FlatRows:
    block_size = table.limits.block_size
    slots, positions, query_start_loc = rows.flatten()
    block_ids = table.block_tables[slots, positions // block_size].astype(np.int64)
    paged = PagedRows(
        query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
        seq_lens=torch.from_numpy(rows.ends.astype(np.int32)),
        block_tables=torch.from_numpy(table.block_tables[rows.slots, :num_blocks]),
        slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size),
    )
    return FlatRows(
        token_ids=torch.from_numpy(table.token_ids[slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        paged=paged,
        sampling_indices=torch.from_numpy(query_start_loc[1:][rows.samples] - 1),
    )
