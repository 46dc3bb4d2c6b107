"""Computation of rows on a device, where the next step can be launched while the device still computes the last one.

The host's `SequenceTable` checks a plan and knows every count. `DeviceTable` stores the row state that the device
needs, including the tokens that the device sampled. A step is a few operations on the compute stream:

 copies -> upload -> changed rows -> inputs gathered -> model -> logits -> sampler -> tokens to their rows

A step in which every row decodes replays a graph (`graphs.py`). Any other step, unless it is large,
replays a graph up to the hidden states (`mixed_graphs.py`); its remaining kernels are launched one by one.

Sampled tokens are copied to pinned memory. The copy runs on the results stream, after the step and concurrently with
the next step. If the next step writes the same memory, the copy runs on the compute stream instead. Block moves have
their own stream, and the moves of a plan start after the computation of the previous plan. No computation on the device
waits for the host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import StepParts, StepResult
from worker_service.attention import AttentionBackend, LayerCache
from worker_service.device.graphs import DecodeBuffers, DecodeGraphs, graph_sizes
from worker_service.device.inputs import OrderedRows, StepInputs
from worker_service.device.kernels import Sampler
from worker_service.device.mixed_graphs import MixedGraphs
from worker_service.device.staging import OnDevice, PinnedBuffer, ResultBuffers, Upload, UploadRing
from worker_service.device.table import DeviceTable, Edit, PackedSampling
from worker_service.models.decoder import Decoder
from worker_service.rows import (
    BegunStep,
    PartStates,
    PooledChunk,
    Pooler,
    PromptChunk,
    Samples,
    SequenceTable,
    StepSampling,
    ValueReader,
    WorkingRows,
    choosing_rows,
    flatten_to_int32,
    pooled_chunks,
    prompt_chunks,
    read_embeddings,
)
from worker_service.step import FinishedStep, LaunchedStep
from worker_service.streams import Device


class DeviceComputation:
    """The computation of a model's steps on a GPU. It implements the interface `Computation`.

    The next step can be launched while the GPU still computes the previous step.
    """

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[LayerCache],
        backend: AttentionBackend,
        sampler: Sampler,
        table: SequenceTable,
        device: Device,
        pooler: Pooler,
        max_graph_batch_size: int = 0,
        max_graph_tokens: int = 0,
        states: Tensor | None = None,
    ) -> None:
        """Create the computation. `layers` are the KV cache's tensors for each layer of the model.

        CUDA graphs are captured for decode batches of up to `max_graph_batch_size` sequences, and for other steps of up
        to `max_graph_tokens` tokens. If `max_graph_batch_size` is 0, no graphs are captured. `states` is the memory of
        the rows' states, see `CacheEngine`; None: the model has no states.
        """
        limits = table.limits
        self.table = table
        self._model = model
        self._layers = layers
        self._states = states
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._device_table = DeviceTable(limits, device.torch_device, sampler)
        self._uploads = UploadRing(device)
        self._result_buffers = ResultBuffers(device)
        is_capturable = backend.is_capturable and sampler.is_capturable
        # Each row of a model with states needs a state of its own.
        max_num_rows = min(limits.max_num_seqs, limits.num_device_states or limits.max_num_seqs)
        sizes = graph_sizes(max_graph_batch_size, max_num_rows) if is_capturable else ()
        self._graphs = DecodeGraphs(sizes, limits, device, states)
        has_mixed_graphs = bool(sizes) and backend.is_mixed_capturable
        self._mixed_graphs = MixedGraphs(max_graph_tokens if has_mixed_graphs else 0, limits, device, states)
        self.num_graphs = 2 * len(sizes) + len(self._mixed_graphs.sizes)
        self._pooler = pooler
        self._clock = StepTimer()
        device.synchronize()  # tensors that were created on another stream are then visible to all streams

    def capture_graphs(self, sum_of_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Capture the CUDA graphs that fit the memory and log a warning for the others.

        See `Computation.capture_graphs`.
        """
        agree = None if sum_of_ranks is None else partial(self._combine_flags, sum_of_ranks)
        self._mixed_graphs.capture(self._forward, agree)
        self._graphs.capture(self._decode, self._sample_decoded, agree)

    def drop_graphs(self) -> None:
        """Discard all captured CUDA graphs. See `Computation.drop_graphs`."""
        self._mixed_graphs.captured.drop()
        self._graphs.captured.drop()

    def run_graphs_uncaptured(self) -> None:
        """Run the operations of the largest CUDA graphs without capturing them.

        See `Computation.run_graphs_uncaptured`.
        """
        self._mixed_graphs.run_uncaptured(self._forward)
        self._graphs.run_uncaptured(self._decode, self._sample_decoded)

    def prepare(self, step: BegunStep, rows: WorkingRows) -> Callable[[], LaunchedStep]:
        """Upload the inputs of a step and the changes of the sequence table to the GPU, in one copy.

        Return a function that launches the step. See `Computation.prepare`.
        """
        work = self._work(rows)
        edits = self._device_table.plan_edits(step.plan, self.table, work.upload)
        return self._send(step, work, edits)

    def launch(self, step: BegunStep, rows: WorkingRows) -> LaunchedStep:
        """Launch the computation of some sequences of a step that does not fit into memory as a whole.

        `prepare` must have been called for the step. See `Computation.launch`.
        """
        return self._send(step, self._work(rows), [])()

    def synchronize(self) -> None:
        """Wait until all launched steps are done. See `Computation.synchronize`."""
        self._device.synchronize()

    def _combine_flags(self, sum_of_ranks: Callable[[Tensor], Tensor], flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether any tensor-parallel rank has set it. All ranks must call this method.

        `sum_of_ranks` returns the sum of a tensor over all ranks.
        """
        counts = torch.tensor(flags, dtype=torch.int32, device=self._device.torch_device)
        summed = OnDevice()
        self._device.synchronize()  # `torch.tensor` copied the counts on another stream
        self._device.compute.run(lambda: summed.put(sum_of_ranks(counts)))
        self._device.synchronize()
        return [count > 0 for count in summed.tensor.tolist()]

    def _work(self, rows: WorkingRows) -> "_Work":
        rows = choosing_rows(self.table, rows)
        sampling = self.table.sampling_of(rows)
        return _Work(rows, sampling, self._pooler.embedding_size(self._model.network.hidden_size))

    def _send(self, step: BegunStep, work: "_Work", edits: list[Edit]) -> Callable[[], LaunchedStep]:
        """Upload the inputs of a launch to the GPU, and apply the edits to the GPU's sequence table.

        Return a function that launches the computation. `work` describes the sequences to compute. The upload also
        contains the values that the edits read.
        """
        put = self._plan_work(work) if len(work.rows.slots) else None
        if work.upload.size:
            work.packed = self._uploads.send(work.upload, work.upload_target)
        for edit in edits:
            self._device.compute.run(partial(_apply, edit, work.packed))

        def launch() -> LaunchedStep:
            if put is None:
                duration_us = (time.perf_counter_ns() - step.watch.began_ns) // 1000
                return FinishedStep(step.result(Samples(()), (), duration_us, StepParts()))
            buffer = self._result_buffers.take(work.num_copied)  # allocates memory, so it comes before any change
            _run(put, work.states, self.table)
            return self._copy_results(step, work, buffer)

        return launch

    def _plan_work(self, work: "_Work") -> Callable[[], None]:
        """Collect the inputs that a launch uploads. Return a function that enqueues the computation after the upload.

        The computation replays a CUDA graph if a graph of a suitable size exists. There must be at least one sequence.
        """
        rows = work.rows
        is_decode = bool(rows.samples.all()) and bool((rows.num_new_tokens == 1).all())
        if is_decode:
            work.states = _states_of(self.table, rows)
            size = self._graphs.size_for(len(rows.slots), work.states)
            if size is not None:
                return self._plan_decode(work, size)
        return self._plan_mixed(work, int(rows.num_new_tokens.sum()))

    def _plan_mixed(self, work: "_Work", num_tokens: int) -> Callable[[], None]:
        """Return a function that enqueues the computation of sequences that decode or prefill, in any mix.

        The function replays the CUDA graph of the next larger number of tokens, if such a graph was captured.
        """
        graphs, compute, upload = self._mixed_graphs, self._device.compute, work.upload
        rows = OrderedRows.of(work.rows)
        work.states = _states_of(self.table, rows.rows)
        rows = replace(rows, states=work.states)
        size = graphs.size_for(rows)
        # One slice per column. The columns that a graph reads are one contiguous slice.
        places = [upload.add(column) for column in rows.uploads()] if size is None else [graphs.pad(rows, size, upload)]
        indices = upload.add(rows.sampling_indices)
        work.chunks = prompt_chunks(self.table, work.rows, rows.token_starts)
        work.pooled = pooled_chunks(self.table, work.rows, rows.token_starts)
        packing = PackedSampling.pack(work.sampling, upload, self._device_table.scratch_slot)
        if size is None:
            return partial(compute.run, partial(self._compute, work, rows, places, indices, packing))

        def put() -> None:
            compute.run(lambda: graphs.set_rows(work.packed.tensor[places[0]]))
            graphs.forward(size)
            compute.run(lambda: self._read_hidden(work, graphs.hidden(num_tokens), indices, packing))

        return put

    def _plan_decode(self, work: "_Work", size: int) -> Callable[[], None]:
        """Return a function that enqueues the computation of sequences that decode one token each.

        The function replays the CUDA graphs of batch size `size`.
        """
        rows, sampling, buffers = work.rows, work.sampling, self._graphs.buffers[size]
        padded = work.upload.add(self._graphs.padded(rows.slots, rows.ends, work.states, size))
        packing = None
        if not sampling.takes_tokens_only:
            packing = PackedSampling.pack(sampling, work.upload, self._device_table.scratch_slot)
        elif work.upload.size == padded.stop - padded.start:  # the upload contains only the padded rows
            work.upload_target = self._graphs.rows(size)
        work.sampled = buffers.sampled if packing is None else None
        compute = self._device.compute

        def put() -> None:
            if work.upload_target is None:
                compute.run(lambda: self._graphs.set_rows(work.packed.tensor[padded]))
            if packing is None:
                self._graphs.forward_and_sample(size)
            else:
                self._graphs.forward(size)
                compute.run(partial(self._sample, work, buffers.logits[: sampling.num_rows], packing, []))

        return put

    def _copy_results(self, step: BegunStep, work: "_Work", buffer: PinnedBuffer) -> LaunchedStep:
        """Enqueue the copy of a launch's results to the host, after the computation. Return the step in progress.

        `buffer` is the pinned host memory that receives the results.
        """
        target, sampled = buffer.tensor[: work.num_copied], work.sampled
        if sampled is not None:
            self._device.compute.run(lambda: target.copy_(sampled.flatten(), non_blocking=True))
        computed = self._device.compute.record()
        if sampled is None and work.num_values:
            self._device.results.wait_for(computed)
            self._device.results.run(lambda: target.copy_(work.results.tensor, non_blocking=True))
            computed = self._device.results.record()
        return _StepInProgress(step, work, buffer, computed, self._result_buffers, self._clock)

    # Operations of the compute stream

    @torch.inference_mode()
    def _compute(
        self, work: "_Work", rows: OrderedRows, places: Sequence[slice], indices: slice, packing: PackedSampling
    ) -> None:
        """Compute a step without a CUDA graph. Its sequences may decode or prefill, in any mix.

        The inputs are in the upload. `places` are the slices with the columns of `rows`. `indices` is the slice with
        the index of the last token of each sequence that samples.
        """
        columns = [work.packed.tensor[place] for place in places]
        hidden = self._forward(rows.inputs(columns, self.table.limits.block_size, self._states))
        self._read_hidden(work, hidden, indices, packing)

    @torch.inference_mode()
    def _read_hidden(self, work: "_Work", hidden: Tensor, sampling_indices: slice, packing: PackedSampling) -> None:
        """Compute the results of a step from its hidden states: samples, prompt log probabilities and embeddings.

        `hidden` [T, hidden_size] contains the final hidden states of all tokens.
        """
        packed = work.packed.tensor
        others: list[Tensor] = []
        for chunk in work.chunks:
            tokens = self._device_table.token_ids[chunk.tokens]
            others += chunk.compute(hidden, tokens, self._model.compute_logits)
        embeddings, sums = self._pooler.pool(hidden, work.pooled)
        others += embeddings
        if work.sampling.num_rows:
            logits = self._model.compute_logits(hidden.index_select(0, packed[sampling_indices]))
            self._sample(work, logits, packing, others)
        elif others:
            work.results.put(flatten_to_int32(others))
        self._pooler.keep(work.pooled, sums)

    @torch.inference_mode()
    def _sample(self, work: "_Work", logits: Tensor, packing: PackedSampling, others: list[Tensor]) -> None:
        """Sample a token for each sequence from `logits`, and store the results in one tensor for the copy to the host.

        The samples are followed by `others`, such as prompt log probabilities.
        """
        packed, table = work.packed.tensor, self._device_table
        token_counts = table.token_counts if packing.is_penalized else None
        columns, target = packing.columns(packed, table), packing.target(packed, table)
        sampled = self._sampler.sample(logits, columns, token_counts, work.sampling.max_reported, target)
        packing.uncount(sampled, packed, table)
        work.results.put(flatten_to_int32([target.sampled, *work.sampling.reports(sampled, logits), *others]))

    @torch.inference_mode()
    def _decode(self, buffers: DecodeBuffers) -> None:
        """Run the forward pass of a batch of sequences that decode one token each, up to the logits.

        Both CUDA graphs of each batch size contain this operation.
        """
        hidden = self._forward(buffers.inputs)
        self._model.compute_logits(hidden, buffers.logits)

    @torch.inference_mode()
    def _sample_decoded(self, buffers: DecodeBuffers) -> None:
        """Sample a token for each sequence of a decode batch that needs no log probabilities or other results.

        The second CUDA graph of each batch size contains this operation.
        """
        inputs, table = buffers.inputs, self._device_table
        columns = table.sampling_columns(inputs.row_slots, inputs.seq_lens)
        self._sampler.sample(buffers.logits, columns, None, None, table.target(inputs.row_slots, buffers.sampled))

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Run the model's forward pass for the tokens of a step. Return the hidden states [T, hidden_size].

        The CUDA graph of each number of tokens contains this operation.
        """
        tokens, batch = inputs.gather(self._device_table)
        attend = self._backend.prepare(batch, self._layers)
        return self._model.forward(tokens.token_ids, tokens.positions, attend, inputs.states)


def _states_of(table: SequenceTable, rows: WorkingRows) -> PartStates | None:
    return table.states.of_part(rows) if table.states.num_states else None


def _run(put: Callable[[], None], states: PartStates | None, table: SequenceTable) -> None:
    """Enqueue the computation of a launch, and record the states that its rows read from now on.

    Raises RuntimeError, which ends the session, if `put` fails when it may have overwritten states that it reads.
    """
    try:
        put()
    except Exception as error:
        if states is None or not states.overwrites:
            raise
        raise RuntimeError("a step failed after it may have overwritten states of its rows") from error
    if states is not None:
        table.states.advance(states)


def _apply(edit: Edit, packed: OnDevice) -> None:
    edit(packed.tensor)


@dataclass(slots=True)
class _Work:
    """The sequences that one launch on the GPU computes, with the inputs and the results of the launch."""

    rows: WorkingRows
    sampling: StepSampling
    embedding_size: int
    upload: Upload = field(default_factory=Upload)
    upload_target: Tensor | None = None  # device memory for the upload; None: new memory
    packed: OnDevice = field(default_factory=OnDevice)  # the upload
    sampled: Tensor | None = None  # [2, batch size] of a graph; None: the step has `results`
    # values that the host reads, from `sampling`, `chunks` and `pooled`
    results: OnDevice = field(default_factory=OnDevice)
    chunks: Sequence[PromptChunk] = ()
    pooled: Sequence[PooledChunk] = ()
    states: PartStates | None = None  # set once the order of the rows is known; None: the model has no states

    @property
    def num_values(self) -> int:
        """The number of int32 and float32 values that the host reads as the results of this launch."""
        num_pooled = sum(chunk.is_last for chunk in self.pooled)
        num_others = sum(chunk.num_values for chunk in self.chunks) + self.embedding_size * num_pooled
        return self.sampling.num_values + num_others

    @property
    def num_copied(self) -> int:
        """The number of values copied to the host.

        For a replayed decode graph this includes the graph's padding rows.
        """
        return self.num_values if self.sampled is None else self.sampled.numel()

    def values(self, copied: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the results of the sequences from the values copied to the host, without a CUDA graph's padding."""
        if self.sampled is None:
            return copied
        return copied[: self.num_copied].reshape(2, -1)[:, : self.sampling.num_rows].ravel()


@dataclass(frozen=True, slots=True)
class _StepInProgress:
    """A step that the GPU computes. It implements the interface `LaunchedStep`.

    The object keeps the tensors alive that the copy of the results reads and writes.
    """

    step: BegunStep
    work: _Work
    buffer: PinnedBuffer
    done: torch.cuda.Event
    buffers: ResultBuffers
    clock: "StepTimer"

    def is_done(self) -> bool:
        return self.done.query()

    def result(self) -> StepResult:
        self.done.synchronize()
        duration_us = self.clock.duration_us(self.step.watch.began_ns)
        reading = ValueReader(self.work.values(self.buffer.array))
        samples = self.work.sampling.read(reading)
        prompt_logprobs = tuple(chunk.read(reading) for chunk in self.work.chunks)
        samples = read_embeddings(
            samples, self.work.sampling.slots, self.work.pooled, reading, self.work.embedding_size
        )
        self.buffers.give_back(self.buffer)
        return self.step.result(samples, prompt_logprobs, duration_us, StepParts(model_us=duration_us))


@dataclass(slots=True)
class StepTimer:
    """A timer for the durations of consecutive steps on a GPU.

    A step can be launched before the previous step ends.
    """

    _last_done_ns: int = 0

    def duration_us(self, launched_ns: int) -> int:
        """Return the duration, in microseconds, of a step that has just finished.

        The duration starts at the launch of the step, or at the end of the previous step if that was later.
        `launched_ns` is a time of `time.perf_counter_ns`.
        """
        began_ns, self._last_done_ns = max(launched_ns, self._last_done_ns), time.perf_counter_ns()
        return (self._last_done_ns - began_ns) // 1000
