"""CUDA graphs of steps in which every row decodes one token. A replay replaces hundreds of kernel launches.

Each batch size has two graphs. One contains only the forward pass, for steps with special sampling. The other contains
the forward pass followed by plain sampling. A step uses the next larger batch size. Its padding rows have no effect:
they are in the scratch slot, store no keys and attend to nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.states import StateRows
from worker_service.device.inputs import StepInputs, fit_states, pad_states, split_columns, state_lengths
from worker_service.device.sized_graphs import Agree, SizedGraphs
from worker_service.device.staging import Upload, aligned
from worker_service.rows import NO_ROW_STATES, PartStates, TableLimits
from worker_service.streams import Device, StreamWork

_FINE_SIZES = (1, 2, 4)
_SIZE_STEP = 8


def graph_sizes(max_graph_batch_size: int, max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes for which decode CUDA graphs are captured: 1, 2, 4, 8, 16, 24, and so on.

    The last size is the smaller of both arguments. The result is empty if either argument is 0.
    """
    largest = min(max_graph_batch_size, max_num_seqs)
    sizes = [size for size in (*_FINE_SIZES, *range(_SIZE_STEP, largest, _SIZE_STEP)) if size < largest]
    return (*sizes, largest) if largest else ()


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """The tensors that the CUDA graphs of one decode batch size read and write, at the same address in every step.

    Attributes:
        inputs: the tokens and rows of the step.
        logits: [size, vocab_size] float32, which sampling overwrites.
        sampled: [2, size] int32: tokens, and whether their logits contain NaN.
    """

    inputs: StepInputs
    logits: Tensor
    sampled: Tensor


class DecodeGraphs:
    """The CUDA graphs of steps in which every sequence decodes one token: two graphs for each batch size.

    `capture` creates the graphs.
    """

    def __init__(self, sizes: Sequence[int], limits: TableLimits, device: Device, states: Tensor | None = None) -> None:
        """Allocate the memory that the graphs read and write. `sizes` are the batch sizes, in ascending order.

        If `sizes` is empty, no graphs are captured. `states` is the memory of the states, see `CacheEngine`; None: the
        model has none.
        """
        largest = max(sizes, default=0)
        self._limits = limits
        self._device = device
        torch_device = device.torch_device
        self._states = states
        # Slots, lengths, and the columns of the states.
        num_packed = sum(map(aligned, self._lengths(largest)))
        self._rows = torch.zeros(num_packed, dtype=torch.int32, device=torch_device)
        self._query_start_loc = torch.arange(largest + 1, dtype=torch.int32, device=torch_device)
        self._logits = torch.empty((largest, limits.vocab_size), dtype=torch.float32, device=torch_device)
        self._sampled = torch.zeros(2 * largest, dtype=torch.int32, device=torch_device)
        self.buffers = {size: self._parts_of(size) for size in sizes}
        self.captured = SizedGraphs[tuple[StreamWork, StreamWork]](sizes, "batch sizes")

    def capture(
        self,
        forward: Callable[[DecodeBuffers], None],
        sample: Callable[[DecodeBuffers], None],
        agree: Agree | None,
    ) -> None:
        """Capture two CUDA graphs for each batch size: `forward` alone, and `forward` followed by `sample`.

        The captured operations run on padding instead of sequences. See `SizedGraphs.capture`.
        """

        def forward_and_sample(buffers: DecodeBuffers) -> None:
            forward(buffers)
            sample(buffers)

        def capture_size(size: int) -> tuple[StreamWork, StreamWork]:
            buffers = self._padding(size)
            forward_alone = self._device.capture(partial(forward, buffers))
            return forward_alone, self._device.capture(partial(forward_and_sample, buffers))

        self.captured.capture(capture_size, agree)

    def run_uncaptured(self, forward: Callable[[DecodeBuffers], None], sample: Callable[[DecodeBuffers], None]) -> None:
        """Run `forward` and `sample` for the largest batch size without capturing them, to measure their memory.

        There must be at least one batch size.
        """
        buffers = self._padding(self.captured.sizes[-1])
        self._device.compute.run(partial(forward, buffers))
        self._device.compute.run(partial(sample, buffers))

    def _padding(self, size: int) -> DecodeBuffers:
        """Fill the inputs of the CUDA graphs of one batch size with padding instead of sequences.

        Return the tensors that the graphs read and write.
        """
        none = np.empty(0, np.int64)
        padding = torch.from_numpy(self.padded(none, none, None if self._states is None else NO_ROW_STATES, size))
        self._device.compute.run(partial(self.set_rows, padding))
        return self.buffers[size]

    def size_for(self, num_rows: int, states: PartStates | None) -> int | None:
        """Return the batch size of the graphs that can compute a batch of decoding sequences, or None if no graph
        can."""
        size = self.captured.size_for(num_rows)
        return size if size is None or states is None or fit_states(states, size) else None

    def padded(
        self, slots: NDArray[np.int64], seq_lens: NDArray[np.int64], states: PartStates | None, size: int
    ) -> NDArray[np.int32]:
        """Return the slots and lengths of a batch of decoding sequences in the layout that the CUDA graphs read.

        A slot is the index of a sequence in the worker's table. The result is int32: all slots, then all lengths, then
        the columns of the states, if the model has any. Each column is padded to the entries for `size` rows and
        aligned.
        """
        rows = np.zeros((2, aligned(size)), np.int32)
        rows[0] = self._limits.max_num_seqs  # the scratch slot
        rows[0, : len(slots)] = slots
        rows[1, : len(slots)] = seq_lens
        if states is None:
            return rows.ravel()
        upload = Upload()
        for column in (*rows, *pad_states(states, np.ones(size - len(slots), np.int32))):
            upload.add(column)
        packed = np.empty(upload.size, np.int32)
        upload.write(packed)
        return packed

    def set_rows(self, rows: Tensor) -> None:
        """Copy the slots and lengths of a step's sequences to the memory that the CUDA graphs read.

        `rows` is the result of `padded`. Must run on the compute stream.
        """
        self._rows[: len(rows)].copy_(rows)

    def rows(self, size: int) -> Tensor:
        """Return the memory from which the CUDA graphs of this batch size read the slots and lengths of the sequences.

        The memory has the layout that `padded` produces.
        """
        return self._rows[: sum(map(aligned, self._lengths(size)))]

    def _lengths(self, size: int) -> tuple[int, ...]:
        return size, size, *(() if self._states is None else state_lengths(size))

    def forward(self, size: int) -> None:
        """Enqueue the CUDA graph of the forward pass for `size` sequences on the compute stream.

        The graph reads the slots and lengths that `set_rows` stored, and writes `DecodeBuffers.logits`.
        """
        self.captured[size][0]()

    def forward_and_sample(self, size: int) -> None:
        """Enqueue the CUDA graph of the forward pass and plain sampling for `size` sequences on the compute stream.

        The sampled tokens are written to the GPU's sequence table and to `DecodeBuffers.sampled`.
        """
        self.captured[size][1]()

    def _parts_of(self, size: int) -> DecodeBuffers:
        slots, seq_lens, *of_states = split_columns(self._rows, self._lengths(size))
        query_start_loc = self._query_start_loc[: size + 1]
        inputs = StepInputs(
            token_slots=slots,
            token_lengths=seq_lens,
            row_slots=slots,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            host_query_start_loc=list(range(size + 1)),
            host_seq_lens=[self._limits.max_model_len] * size,
            num_decodes=size,
            states=None if self._states is None else StateRows(self._states, query_start_loc, *of_states),
        )
        return DecodeBuffers(inputs, self._logits[:size], self._sampled[: 2 * size].view(2, size))
