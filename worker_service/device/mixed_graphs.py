"""CUDA graphs of the forward pass of steps with prompts: by number of tokens, for any mix of rows.

A step takes the next larger number of tokens. Its tokens of padding are in the scratch slot, keep no keys, and belong
to one row that attends to nothing; further rows of padding have no tokens. What is done with hidden states, logits and
samples among it, differs from step to step and is launched behind the graph.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from worker_service.device.inputs import OrderedRows, StepInputs
from worker_service.device.sized_graphs import Agree, SizedGraphs
from worker_service.device.staging import Upload, aligned
from worker_service.rows import TableLimits, WorkingRows
from worker_service.streams import Device, StreamWork

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


class MixedGraphs:
    """Graphs by number of tokens. Until `capture` there are none."""

    def __init__(self, max_graph_tokens: int, limits: TableLimits, device: Device) -> None:
        """`max_graph_tokens`: 0: no graphs at all."""
        self.sizes = token_counts(max_graph_tokens, limits.max_num_batched_tokens)
        self._limits = limits
        self._device = device
        largest = max(self.sizes, default=0)
        num_packed = sum(map(aligned, self._lengths(largest)))
        self._packed = torch.zeros(num_packed, dtype=torch.int32, device=device.torch_device)
        self.captured = SizedGraphs[StreamWork](self.sizes, "numbers of tokens")
        self._hidden: Tensor | None = None  # [at least the largest, hidden_size], once that was carried out

    def capture(self, forward: Callable[[StepInputs], Tensor], agree: Agree | None) -> None:
        """Capture the forward pass, which returns hidden states, over rows of padding. See `SizedGraphs.capture`."""
        self.captured.capture(lambda size: self._device.capture(self._padding(size, forward)), agree)

    def rehearse(self, forward: Callable[[StepInputs], Tensor]) -> None:
        """Carry the forward pass out for the largest size, if there is one, and capture nothing."""
        if self.sizes:
            self._device.compute.run(self._padding(self.sizes[-1], forward))

    def pad(self, rows: OrderedRows, size: int, upload: Upload) -> slice:
        """Add to `upload` the columns of the rows, one behind the other, as the graph of that size reads them. Return
        where they will lie."""
        paddings = (self._limits.max_num_seqs, 0, self._limits.max_num_seqs, 0, size)
        start = upload.size
        for values, length, padding in zip(rows.columns, self._lengths(size), paddings, strict=True):
            column = np.full(length, padding, np.int32)
            column[: len(values)] = values
            upload.add(column)
        return slice(start, upload.size)

    def set_rows(self, packed: Tensor) -> None:
        """Put what `pad` has packed of a step where graphs read it. To be carried out on the compute stream."""
        self._packed[: len(packed)].copy_(packed)

    def forward(self, size: int) -> None:
        """Put the forward pass on the compute stream: from the rows to `hidden`."""
        self.captured[size]()

    def hidden(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size], of the step whose graph was replayed last. For operations of the compute stream
        behind it."""
        assert self._hidden is not None
        return self._hidden[:num_tokens]

    def _padding(self, size: int, forward: Callable[[StepInputs], Tensor]) -> Callable[[], None]:
        """Put rows of padding where the graph reads them. Returns what is to be captured."""
        none = np.empty(0, np.int64)
        upload = Upload()
        self.pad(OrderedRows.of(WorkingRows(none, none, none, none.astype(np.bool_))), size, upload)
        packed = np.empty(upload.size, np.int32)
        upload.write(packed)
        self._device.compute.run(partial(self.set_rows, torch.from_numpy(packed)))
        return partial(self._keep_hidden, forward, self._inputs(size))

    def _inputs(self, size: int) -> StepInputs:
        """The columns where `set_rows` puts them."""
        lengths = self._lengths(size)
        ends = accumulate(aligned(length) for length in lengths)
        columns = [self._packed[end - aligned(length) :][:length] for end, length in zip(ends, lengths, strict=True)]
        token_slots, token_lengths, row_slots, seq_lens, query_start_loc = columns
        return StepInputs(
            token_slots,
            token_lengths,
            row_slots,
            seq_lens,
            query_start_loc,
            host_query_start_loc=[],
            host_seq_lens=[self._limits.max_model_len] * len(row_slots),
            num_decodes=None,
        )

    def _lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Of the columns of that many tokens: see `StepInputs`."""
        # All rows that a step may have, and one for the tokens of padding, where there may be any.
        num_rows = min(self._limits.max_num_seqs + 1, num_tokens)
        return num_tokens, num_tokens, num_rows, num_rows, num_rows + 1

    @torch.inference_mode()
    def _keep_hidden(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> None:
        hidden = forward(inputs)
        # The largest that fits comes first, and is carried out before it is captured.
        if self._hidden is None or len(self._hidden) < len(hidden):
            self._hidden = torch.empty_like(hidden)
        self._hidden[: len(hidden)].copy_(hidden)
