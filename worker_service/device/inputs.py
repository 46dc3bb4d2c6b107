"""The inputs of a step on a device: the columns that the host sends, and the tensors gathered from the row table."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.gathering import GatheredTokens
from pagewire.kernels.states import StateRows
from worker_service.attention import AttentionBatch, DeviceRows
from worker_service.device.staging import aligned
from worker_service.device.table import DeviceTable
from worker_service.rows import PartStates, WorkingRows

# The number of saves, per row, for which a CUDA graph has room: the last state, and the state before the last position.
_SAVES_PER_ROW = 2


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
        states: the states that the rows read and write; None: the model has none.
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
    states: StateRows | None = None

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
        states: the states of the rows; None: the model has none.
        token_starts: [S] offset of each row's tokens in the flat batch, in slot order.
        sampling_indices: [R] index of the last token of each row that samples, in slot order.
    """

    rows: WorkingRows
    columns: tuple[NDArray[np.int64], ...]
    token_starts: NDArray[np.int64]
    sampling_indices: NDArray[np.int64]
    states: PartStates | None = None

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

    def uploads(self) -> tuple[NDArray[np.integer], ...]:
        """Return the columns to send to the GPU to compute this step without a CUDA graph."""
        return self.columns if self.states is None else (*self.columns, *self.states.columns)

    def inputs(self, columns: Sequence[Tensor], block_size: int, states: Tensor | None) -> StepInputs:
        """Return the inputs of this step as GPU tensors, to compute the step without a CUDA graph.

        There must be at least one sequence. `columns` are the values of `uploads` on the GPU, and `states` is the
        memory of the states, if the model has any.
        """
        seq_lens = self.rows.ends.tolist()
        token_slots, token_lengths, row_slots, device_seq_lens, query_start_loc, *of_states = columns
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
            states=None if states is None else StateRows(states, query_start_loc, *of_states),
        )


def state_lengths(num_rows: int) -> tuple[int, ...]:
    """Return the lengths of the columns of `PartStates` in a CUDA graph for `num_rows` rows, padding rows included."""
    return num_rows, num_rows + 1, _SAVES_PER_ROW * num_rows, _SAVES_PER_ROW * num_rows


def fit_states(states: PartStates, num_rows: int) -> bool:
    """Return whether a CUDA graph for `num_rows` rows has room for the saves of a step, and for one of each padding
    row."""
    reads, _, save_counts, _ = states.columns
    return len(save_counts) + num_rows - len(reads) <= _SAVES_PER_ROW * num_rows


def pad_states(states: PartStates, num_padding_tokens: NDArray[np.integer]) -> list[NDArray[np.int32]]:
    """Return the columns of `states` with padding rows, in the lengths of `state_lengths`.

    `num_padding_tokens` has the number of tokens of each padding row. A padding row saves to state 0, which writes
    nothing, after its last token, so that all its tokens are computed. `fit_states` must hold.
    """
    reads, save_start_loc, save_counts, save_states = states.columns
    num_rows, num_saves = len(reads) + len(num_padding_tokens), len(save_counts)
    columns = [np.zeros(length, np.int32) for length in state_lengths(num_rows)]
    columns[0][: len(reads)] = reads
    columns[1][: len(save_start_loc)] = save_start_loc
    columns[1][len(save_start_loc) :] = num_saves + np.arange(1, len(num_padding_tokens) + 1)
    columns[2][:num_saves] = save_counts
    columns[2][num_saves : num_saves + len(num_padding_tokens)] = num_padding_tokens
    columns[3][:num_saves] = save_states
    return columns


def split_columns(packed: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return the columns of these lengths that an `Upload` has packed one after another, as views."""
    starts = accumulate(map(aligned, lengths), initial=0)
    return [packed[start:][:length] for start, length in zip(starts, lengths, strict=False)]
