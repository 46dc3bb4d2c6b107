"""CUDA graphs of the forward pass of steps with prompts: by number of tokens, for any mix of rows.

A step takes the next larger number of tokens. Its tokens of padding are in the scratch slot, keep no keys, and belong
to one row that attends to nothing; further rows of padding have no tokens. What is done with hidden states, logits and
samples among it, differs from step to step and is launched behind the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.gathering import ALIGNMENT
from worker_service.attention import AttentionBatch, DeviceRows
from worker_service.device.inputs import DeviceBatch, OrderedRows
from worker_service.device.sized_graphs import Agree, SizedGraphs
from worker_service.device.staging import Upload
from worker_service.device.table import DeviceTable
from worker_service.rows import TableLimits, WorkingRows
from worker_service.streams import Device, Graph

_FINEST_STEP = 16
_STEPS_PER_DOUBLING = 4


def token_counts(max_graph_tokens: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """16, 32, 48, 64, 80, ..., 128, 160, ..., 256, 320, ...: up to the largest, each at most a quarter above the one
    before from 64 on."""
    largest = min(max_graph_tokens, max_num_batched_tokens)
    counts, count = [], _FINEST_STEP
    while count < largest:
        counts.append(count)
        count += max(_FINEST_STEP, (1 << (count.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return (*counts, largest) if largest else ()


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """A step's rows on the host, those with one token each first.

    Attributes:
        packed: int32, the columns of `MixedInputs` one behind the other, each aligned.
        token_starts: [S] where each row's tokens lie in the flat batch, in slot order.
        sampling_indices: [R], of the last tokens of the rows that sample, in slot order.
    """

    packed: NDArray[np.int32]
    token_starts: NDArray[np.int64]
    sampling_indices: NDArray[np.int64]

    @staticmethod
    def of(rows: WorkingRows, num_tokens: int, num_rows: int, scratch_slot: int) -> "PaddedRows":
        """Return them padded to `num_tokens` and `num_rows`."""
        ordered = OrderedRows.of(rows)
        upload = Upload()
        upload.add(_padded(ordered.token_slots, num_tokens, scratch_slot))
        upload.add(_padded(ordered.token_lengths, num_tokens, 0))
        upload.add(_padded(ordered.rows.slots, num_rows, scratch_slot))
        upload.add(_padded(ordered.rows.ends, num_rows, 0))
        upload.add(_padded(ordered.query_start_loc, num_rows + 1, num_tokens))
        packed = np.empty(upload.size, np.int32)
        upload.write(packed)
        return PaddedRows(packed, ordered.token_starts, ordered.sampling_indices)


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """T tokens of any mix of S rows, as a graph reads them.

    Attributes:
        token_slots, token_lengths: [T] int32, the tokens of a token's row up to it and with it; those of padding are in
            the scratch slot, with length 0.
        row_slots, seq_lens: [S] int32; rows of padding are in the scratch slot, with length 0.
        query_start_loc: [S + 1] int32; rows that decode come first, and the last token of all is T.
        max_seq_len: the most that any step's rows have.
    """

    token_slots: Tensor
    token_lengths: Tensor
    row_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_seq_len: int

    @staticmethod
    def lie_in(packed: Tensor, num_tokens: int, num_rows: int, limits: TableLimits) -> "MixedInputs":
        """Views of `packed`, laid out as `PaddedRows` packs them."""
        starts = [0]
        sizes = (num_tokens, num_tokens, num_rows, num_rows, num_rows + 1)
        for size in sizes:
            starts.append(starts[-1] + size + -size % ALIGNMENT)
        columns = [packed[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
        token_slots, token_lengths, row_slots, seq_lens, query_start_loc = columns
        return MixedInputs(token_slots, token_lengths, row_slots, seq_lens, query_start_loc, limits.max_model_len)

    def gather(self, table: DeviceTable) -> DeviceBatch:
        tokens = table.tokens(self.token_slots, self.token_lengths, self.row_slots)
        attention = AttentionBatch(
            query_start_loc=[],
            seq_lens=[self.max_seq_len] * len(self.row_slots),
            block_tables=tokens.block_tables,
            slot_mapping=tokens.slot_mapping,
            device_rows=DeviceRows(self.query_start_loc, self.seq_lens, None),
        )
        return DeviceBatch(tokens.token_ids, tokens.positions, attention)


class MixedGraphs:
    """Graphs by number of tokens. Until `capture` there are none."""

    def __init__(self, max_graph_tokens: int, limits: TableLimits, device: Device) -> None:
        """`max_graph_tokens`: 0: no graphs at all."""
        self.sizes = token_counts(max_graph_tokens, limits.max_num_batched_tokens)
        self._limits = limits
        self._device = device
        largest = max(self.sizes, default=0)
        num_packed = 2 * (largest + self._num_rows(largest)) + self._num_rows(largest) + 1 + 5 * ALIGNMENT
        self._packed = torch.zeros(num_packed, dtype=torch.int32, device=device.torch_device)
        self.captured = SizedGraphs[Graph](self.sizes, "numbers of tokens")
        self._hidden: Tensor | None = None  # [at least the largest, hidden_size], once that was carried out

    def capture(self, forward: Callable[[MixedInputs], Tensor], agree: Agree | None) -> None:
        """Capture the forward pass, which returns hidden states, over rows of padding. See `SizedGraphs.capture`."""
        self.captured.capture(lambda size: self._device.capture(self._padding(size, forward)), agree)

    def rehearse(self, forward: Callable[[MixedInputs], Tensor]) -> None:
        """Carry the forward pass out for the largest size, if there is one, and capture nothing."""
        if self.sizes:
            self._device.compute.run(self._padding(self.sizes[-1], forward))

    def padded(self, rows: WorkingRows, size: int) -> PaddedRows:
        """The rows as the graph of that size reads them."""
        return PaddedRows.of(rows, size, self._num_rows(size), self._limits.max_num_seqs)

    def set_rows(self, packed: Tensor) -> None:
        """Put a step's `PaddedRows.packed` where graphs read it. To be carried out on the compute stream."""
        self._packed[: len(packed)].copy_(packed)

    def forward(self, size: int) -> None:
        """Put the forward pass on the compute stream: from the rows to `hidden`."""
        self.captured[size].replay()

    def hidden(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size], of the step whose graph was replayed last. For operations of the compute stream
        behind it."""
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def _num_rows(self, num_tokens: int) -> int:
        """All rows that a step may have, and one for the tokens of padding, where there may be any."""
        return min(self._limits.max_num_seqs + 1, num_tokens)

    def _padding(self, size: int, forward: Callable[[MixedInputs], Tensor]) -> Callable[[], None]:
        """Put rows of padding where the graph reads them. Returns what is to be captured."""
        none = np.empty(0, np.int64)
        padded = self.padded(WorkingRows(none, none, none, none.astype(np.bool_)), size)
        self._device.compute.run(partial(self.set_rows, torch.from_numpy(padded.packed)))
        inputs = MixedInputs.lie_in(self._packed, size, self._num_rows(size), self._limits)
        return partial(self._keep_hidden, forward, inputs)

    @torch.inference_mode()
    def _keep_hidden(self, forward: Callable[[MixedInputs], Tensor], inputs: MixedInputs) -> None:
        hidden = forward(inputs)
        # The largest that fits comes first, and is carried out before it is captured.
        if self._hidden is None or len(self._hidden) < len(hidden):
            self._hidden = torch.empty_like(hidden)
        self._hidden[: len(hidden)].copy_(hidden)


def _padded(values: NDArray[np.int64], size: int, padding: int) -> NDArray[np.int32]:
    column = np.full(size, padding, np.int32)
    column[: len(values)] = values
    return column
