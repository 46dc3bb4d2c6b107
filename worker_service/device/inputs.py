"""The inputs of a step on a device: the columns that the host sends, and the tensors gathered from the row table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.gathering import GatheredTokens
from worker_service.attention import AttentionBatch, DeviceRows
from worker_service.device.table import DeviceTable
from worker_service.rows import WorkingRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The T new tokens of S running sequences (rows) in one step, in the layout that a GPU reads.

    The rows may decode or prefill in any mix. The inputs belong to one step, or to every step that replays one CUDA
    graph.

    Attributes:
        token_slots, token_lengths: [T] int32, for each token the slot of its row, and the row's number of tokens up to
            and including that token. Padding tokens are in the scratch slot, with length 0.
        row_slots, seq_lens: [S] int32; padding rows are in the scratch slot, with length 0.
        query_start_loc: [S + 1] int32, the offset of each row's tokens; rows that decode come first.
        host_query_start_loc, host_seq_lens, num_decodes: see `AttentionBatch` and `DeviceRows`.
        num_blocks: number of blocks of the longest row; None: the limit for any row.
    """

    token_slots: Tensor
    token_lengths: Tensor
    row_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    host_query_start_loc: list[int]
    host_seq_lens: list[int]
    num_decodes: int | None
    num_blocks: int | None = None

    def gather(self, table: DeviceTable) -> tuple[GatheredTokens, AttentionBatch]:
        """Read the step's tokens and block tables from the GPU's sequence table.

        Return (tokens, batch): the new tokens, and the inputs of the attention backend.
        """
        tokens = table.tokens(self.token_slots, self.token_lengths, self.row_slots, self.num_blocks)
        attention = AttentionBatch(
            query_start_loc=self.host_query_start_loc,
            seq_lens=self.host_seq_lens,
            block_tables=tokens.block_tables,
            slot_mapping=tokens.slot_mapping,
            device_rows=DeviceRows(self.query_start_loc, self.seq_lens, self.num_decodes),
        )
        return tokens, attention


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows of a step in the order in which a GPU computes them: rows with one new token come first.

    The object is on the host. A row is the worker's state of one running sequence.

    Attributes:
        columns: [T], [T], [S], [S] and [S + 1], the first five fields of `StepInputs`.
        token_starts: [S] offset of each row's tokens in the flat batch, in slot order.
        sampling_indices: [R] index of the last token of each row that samples, in slot order.
    """

    rows: WorkingRows
    columns: tuple[NDArray[np.int64], ...]
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
        columns = (token_slots, positions + 1, ordered.slots, ordered.ends, query_start_loc)
        return OrderedRows(ordered, columns, token_starts, last_tokens[rows.samples])

    def inputs(self, columns: Sequence[Tensor], block_size: int) -> StepInputs:
        """Return the inputs of this step as GPU tensors, to compute the step without a CUDA graph.

        There must be at least one sequence. `columns` are the values of `self.columns` on the GPU.
        """
        seq_lens = self.rows.ends.tolist()
        token_slots, token_lengths, row_slots, device_seq_lens, query_start_loc = columns
        return StepInputs(
            token_slots,
            token_lengths,
            row_slots,
            device_seq_lens,
            query_start_loc,
            host_query_start_loc=self.columns[-1].tolist(),
            host_seq_lens=seq_lens,
            num_decodes=int((self.rows.num_new_tokens == 1).sum()),
            num_blocks=-(-max(seq_lens) // block_size),
        )
