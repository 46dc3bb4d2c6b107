"""CUDA graphs of the forward pass of steps with prompts: one graph per number of tokens, for any mix of rows.

A step uses the next larger number of tokens. Its padding tokens are in the scratch slot, store no keys, and belong to
one row that attends to nothing. Further padding rows have no tokens. The use of the hidden states, such as logits and
sampling, differs between steps and is launched after the graph.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.states import StateRows
from worker_service.device.inputs import OrderedRows, StepInputs, fit_states, pad_states, split_columns, state_lengths
from worker_service.device.sized_graphs import Agree, SizedGraphs
from worker_service.device.staging import Upload, aligned
from worker_service.rows import NO_ROW_STATES, TableLimits, WorkingRows
from worker_service.streams import Device, StreamWork

_FINEST_STEP = 16
_STEPS_PER_DOUBLING = 4


def token_counts(max_graph_tokens: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which CUDA graphs are captured: 16, 32, 48, ..., 128, 160, ..., 256, 320, ...

    The last number is the smaller of both arguments. From 64 on, each number is at most a quarter larger than the
    previous one.
    """
    largest = min(max_graph_tokens, max_num_batched_tokens)
    counts, count = [], _FINEST_STEP
    while count < largest:
        counts.append(count)
        count += max(_FINEST_STEP, (1 << (count.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return (*counts, largest) if largest else ()


class MixedGraphs:
    """The CUDA graphs of the forward pass of steps that include prompts: one graph for each number of tokens.

    `capture` creates the graphs.
    """

    def __init__(
        self, max_graph_tokens: int, limits: TableLimits, device: Device, states: Tensor | None = None
    ) -> None:
        """Allocate the memory that the graphs read. If `max_graph_tokens` is 0, no graphs are captured.

        `states` is the memory of the states, see `CacheEngine`; None: the model has none.
        """
        self.sizes = token_counts(max_graph_tokens, limits.max_num_batched_tokens)
        self._limits = limits
        self._device = device
        self._states = states
        largest = max(self.sizes, default=0)
        num_packed = sum(map(aligned, self._lengths(largest)))
        self._packed = torch.zeros(num_packed, dtype=torch.int32, device=device.torch_device)
        self.captured = SizedGraphs[StreamWork](self.sizes, "numbers of tokens")
        # [at least the largest captured size, hidden_size], allocated when that size first runs
        self._hidden: Tensor | None = None

    def capture(self, forward: Callable[[StepInputs], Tensor], agree: Agree | None) -> None:
        """Capture a CUDA graph of `forward` for each number of tokens that fits into memory.

        `forward` returns the hidden states. During the capture it computes padding instead of sequences. See
        `SizedGraphs.capture`.
        """
        self.captured.capture(lambda size: self._device.capture(self._padding(size, forward)), agree)

    def run_uncaptured(self, forward: Callable[[StepInputs], Tensor]) -> None:
        """Run the forward pass for the largest number of tokens without capturing it, to measure its memory.

        Do nothing if no graphs are to be captured.
        """
        if self.sizes:
            self._device.compute.run(self._padding(self.sizes[-1], forward))

    def size_for(self, rows: OrderedRows) -> int | None:
        """Return the number of tokens of the graph that can compute a step, or None if there is none."""
        size = self.captured.size_for(len(rows.columns[0]))
        if size is None or rows.states is None or fit_states(rows.states, self._num_rows(size)):
            return size
        return None

    def pad(self, rows: OrderedRows, size: int, upload: Upload) -> slice:
        """Add the tokens and sequences of a step to `upload`, in the layout that the CUDA graph of `size` tokens reads.

        The tokens are padded to `size`. Return the slice of the upload that the CUDA graph reads.
        """
        paddings = (self._limits.max_num_seqs, 0, self._limits.max_num_seqs, 0, size)
        start = upload.size
        for values, length, padding in zip(rows.columns, self._lengths(size), paddings, strict=False):
            column = np.full(length, padding, np.int32)
            column[: len(values)] = values
            upload.add(column)
        if rows.states is not None:
            num_padding_tokens = np.zeros(self._num_rows(size) - len(rows.columns[2]), np.int32)
            num_padding_tokens[:1] = size - len(rows.columns[0])
            for column in pad_states(rows.states, num_padding_tokens):
                upload.add(column)
        return slice(start, upload.size)

    def set_rows(self, packed: Tensor) -> None:
        """Copy the tokens and sequences of a step, as packed by `pad`, to the memory that the CUDA graphs read.

        Must run on the compute stream.
        """
        self._packed[: len(packed)].copy_(packed)

    def forward(self, size: int) -> None:
        """Enqueue the CUDA graph of the forward pass for `size` tokens on the compute stream.

        The graph reads the inputs that `set_rows` stored. `hidden` returns the result.
        """
        self.captured[size]()

    def hidden(self, num_tokens: int) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of the step whose CUDA graph was replayed last.

        Only operations that follow the graph on the compute stream may read them.
        """
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def _padding(self, size: int, forward: Callable[[StepInputs], Tensor]) -> Callable[[], None]:
        """Fill the memory that the CUDA graph of this size reads with padding. Return the operation to capture."""
        none = np.empty(0, np.int64)
        upload = Upload()
        rows = OrderedRows.of(WorkingRows(none, none, none, none.astype(np.bool_)))
        self.pad(replace(rows, states=None if self._states is None else NO_ROW_STATES), size, upload)
        packed = np.empty(upload.size, np.int32)
        upload.write(packed)
        self._device.compute.run(partial(self.set_rows, torch.from_numpy(packed)))
        return partial(self._keep_hidden, forward, self._inputs(size))

    def _inputs(self, size: int) -> StepInputs:
        """Return the inputs of a CUDA graph. Their tensors are views of the memory that `set_rows` writes."""
        columns = split_columns(self._packed, self._lengths(size))
        token_slots, token_lengths, row_slots, seq_lens, query_start_loc, *of_states = columns
        return StepInputs(
            token_slots,
            token_lengths,
            row_slots,
            seq_lens,
            query_start_loc,
            host_query_start_loc=[],
            host_seq_lens=[self._limits.max_model_len] * len(row_slots),
            num_decodes=None,
            states=None if self._states is None else StateRows(self._states, query_start_loc, *of_states),
        )

    def _lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths of the input columns of a CUDA graph for this number of tokens: first the columns of
        `StepInputs`, then the columns of the states, if the model has any."""
        num_rows = self._num_rows(num_tokens)
        of_states = () if self._states is None else state_lengths(num_rows)
        return num_tokens, num_tokens, num_rows, num_rows, num_rows + 1, *of_states

    def _num_rows(self, num_tokens: int) -> int:
        """Return the most rows that a step of this size may have, plus one for padding tokens if there may be any."""
        return min(self._limits.max_num_seqs + 1, num_tokens)

    @torch.inference_mode()
    def _keep_hidden(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> None:
        hidden = forward(inputs)
        # The largest size that fits comes first, and runs once before it is captured.
        if self._hidden is None or len(self._hidden) < len(hidden):
            self._hidden = torch.empty_like(hidden)
        self._hidden[: len(hidden)].copy_(hidden)
