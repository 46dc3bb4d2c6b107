"""Carries out plans on a GPU, and launches the next one while the device still computes.

The host's `SequenceTable` checks a plan and knows every count; `DeviceTable` keeps what the device needs of the rows,
the tokens that it sampled among it. A step is a few operations on the compute stream:

    copies -> upload -> changed rows -> inputs gathered -> model -> logits -> sampler -> tokens to their rows

Steps in which every row decodes replay graphs (`decode_graphs.py`), others are launched kernel by kernel. What a step
sampled is copied to pinned memory on the results stream, behind the step and beside the next one. Moves have a stream
of their own, which begins after the compute of the plan before. Nothing that the device computes waits for the host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from worker_service.attention import AttentionBackend
from worker_service.device.errors import free_memory, is_fatal, is_out_of_memory
from worker_service.device.graphs import DecodeBuffers, DecodeGraphs, graph_sizes
from worker_service.device.inputs import DeviceBatch, StepInputs
from worker_service.device.sampler import Sampler
from worker_service.device.sampling import PackedSampling, Reading, SamplingRequests, StepSampling
from worker_service.device.staging import OnDevice, PinnedBuffer, ResultBuffers, Upload, UploadRing, flatten_to_int32
from worker_service.device.streams import Device, Event
from worker_service.device.table import DeviceTable, Edit
from worker_service.engine import FinishedStep, LaunchedStep
from worker_service.host.computation import Model
from worker_service.memory.cache_engine import CacheEngine
from worker_service.models.communicator import Communicator
from worker_service.rows.parts import StepOutline, StepPart, join_results, run_in_parts, take_rows
from worker_service.rows.prompt_logprobs import PromptChunk, prompt_chunks
from worker_service.rows.table import SequenceTable, TableLimits, WorkingRows
from worker_service.session import ProtocolError
from worker_service.step import StepParts, StepPlan, StepResult


class CudaRunner:
    """One model, one KV cache, one table of running sequences, on one device."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        backend: AttentionBackend,
        sampler: Sampler,
        limits: TableLimits,
        device: Device,
        communicator: Communicator,
        max_graph_batch_size: int = 0,
        splits_steps: bool = True,
    ) -> None:
        """Graphs are there from `capture_graphs` on, for batches of up to `max_graph_batch_size` rows.

        `splits_steps`: computes a step in parts where memory does not suffice.
        """
        self.table = SequenceTable(limits)
        self._model = model
        self._cache = cache
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._communicator = communicator
        self._device_table = DeviceTable(limits, device.torch_device, sampler.count_tokens)
        self._requests = SamplingRequests(limits)
        self._uploads = UploadRing(device)
        self._results = ResultBuffers(device)
        is_capturable = backend.is_capturable and sampler.is_capturable
        self.graph_sizes = graph_sizes(max_graph_batch_size, limits.max_num_seqs) if is_capturable else ()
        self._graphs = DecodeGraphs(self.graph_sizes, limits, device)
        self._is_out_of_memory = is_out_of_memory if splits_steps else lambda error: False
        self._clock = _StepClock()
        device.synchronize()  # what was made on another stream is there for all

    def capture_graphs(self) -> None:
        """To be called once, before the first plan."""
        self._graphs.capture(self._decode, self._sample_decoded)

    def rehearse_graphs(self) -> None:
        """Do what the largest graphs would do; there must be some. To be called in place of `capture_graphs`."""
        self._graphs.rehearse(self._decode, self._sample_decoded)

    def reset(self, epoch: int) -> None:
        """Begin an epoch: no rows, and everything that was started has finished."""
        self._communicator.begin(epoch)  # what waits on the device for a rank that is lost ends too
        self._device.synchronize()
        self.table.clear()
        self._cache.reset()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See `Runner.launch`. Raises ProtocolError before any block is touched if the plan breaks a rule."""
        launched_ns = time.perf_counter_ns()
        self._cache.check(plan)
        rows = self.table.apply(plan)
        self._requests.update(plan, self.table)
        self._cache.move(plan)
        self._cache.copy(plan)
        step = _Step(plan, rows, self._requests.of_step(self.table, rows))
        edits = self._device_table.plan_edits(plan, self.table, step.upload)
        is_whole = rows.are_plain or not self.table.has_failed[rows.slots].any()
        put_work = self._plan_work(step) if is_whole else None
        if step.upload.size:
            step.packed = self._uploads.send(step.upload)
        for edit in edits:
            self._device.compute.run(partial(_apply, edit, step.packed))
        launched: LaunchedStep
        if put_work is not None and self._fits(put_work):
            launched = self._follow(step, launched_ns)
        else:
            launched = self._launch_in_parts(plan, rows, launched_ns)
        self.table.advance(rows, None)
        return launched

    def _fits(self, put_work: Callable[[], None]) -> bool:
        """Whether the step's work could be put on the device. Memory is taken then, not when it is carried out."""
        try:
            put_work()
        except Exception as error:
            if not self._is_out_of_memory(error):
                raise
            return False
        return True

    def _launch_in_parts(self, plan: StepPlan, rows: WorkingRows, launched_ns: int) -> LaunchedStep:
        """Each part is a step of its own. Rows that were given up before, or are now, are in none."""
        outline = StepOutline.of(self.table, rows)
        has_failed = self.table.has_failed[rows.slots]
        self._give_up(take_rows(rows, has_failed))
        parts = run_in_parts(
            take_rows(rows, ~has_failed),
            partial(self._launch_part, plan, launched_ns),
            is_out_of_memory=self._is_out_of_memory,
            free_memory=partial(free_memory, self._device.torch_device),
            give_up=self._give_up,
        )
        return _PartsUnderWay(plan, outline, parts)

    def _launch_part(self, plan: StepPlan, launched_ns: int, rows: WorkingRows) -> LaunchedStep:
        step = _Step(plan, rows, self._requests.of_step(self.table, rows))
        put_work = self._plan_work(step)
        step.packed = self._uploads.send(step.upload)
        put_work()
        return self._follow(step, launched_ns)

    def _give_up(self, rows: WorkingRows) -> None:
        """These rows are not computed, in this step and in any later one; what they should have written is spoilt."""
        for slot, start, end in zip(rows.slots, rows.starts, rows.ends, strict=True):
            self._cache.spoil(self.table.block_tables[slot], int(start), int(end))
        self.table.fail(rows.slots)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan and wait for it."""
        result = self.launch(plan).result()
        return replace(result, last_moved_step=self._cache.last_moved_step())

    def last_moved_step(self) -> int:
        """The moves of all plans of this epoch up to this step are done."""
        return self._cache.last_moved_step()

    @property
    def is_moving(self) -> bool:
        """Whether moves are under way that no result has told of."""
        return self._cache.is_moving

    def is_fatal(self, error: Exception) -> bool:
        """Whether the device is in an error state that stays: then waiting for it fails too."""
        if isinstance(error, ProtocolError):
            return False
        try:
            self._device.synchronize()
        except Exception:
            return True
        return is_fatal(error)

    def _plan_work(self, step: "_Step") -> Callable[[], None]:
        """Packs what the step's work reads. Returns what puts it on the compute stream once that is on its way."""
        rows = step.rows
        if not len(rows.slots):
            return lambda: None
        is_decode = bool(rows.samples.all()) and bool((rows.num_new_tokens == 1).all())
        size = self._graphs.size_for(len(rows.slots)) if is_decode else None
        if size is not None:
            return self._plan_decode(step, size)
        inputs = StepInputs.of(rows, self.table.limits.block_size, step.upload)
        step.chunks = prompt_chunks(self.table, rows, inputs.token_starts, self.table.limits.vocab_size)
        sampling = step.sampling.pack(step.upload, self._device_table.scratch_slot)
        return partial(self._device.compute.run, partial(self._compute, step, inputs, sampling))

    def _plan_decode(self, step: "_Step", size: int) -> Callable[[], None]:
        """Of rows that decode one token each, by the graphs of that size."""
        rows, sampling, buffers = step.rows, step.sampling, self._graphs.buffers(size)
        padded = step.upload.add(self._graphs.padded(rows.slots, rows.ends, size))
        packing = None if sampling.is_plain else sampling.pack(step.upload, self._device_table.scratch_slot)
        compute = self._device.compute

        def put() -> None:
            compute.run(lambda: self._graphs.set_rows(step.packed.tensor[padded]))
            self._graphs.forward(size)
            if packing is None:
                self._graphs.sample(size)
                compute.run(lambda: step.told.put(flatten_to_int32([buffers.sampled[:, : sampling.num_rows]])))
            else:
                compute.run(partial(self._sample, step, buffers.logits[: sampling.num_rows], packing, []))

        return put

    def _follow(self, step: "_Step", launched_ns: int) -> LaunchedStep:
        """Have the results copied to the host behind the step."""
        if not len(step.rows.slots):
            duration_us = (time.perf_counter_ns() - launched_ns) // 1000
            moved = self._cache.last_moved_step()
            return FinishedStep(
                StepResult(step.plan.epoch, step.plan.step, duration_us=duration_us, last_moved_step=moved)
            )
        num_values = step.sampling.num_values + sum(chunk.num_values for chunk in step.chunks)
        buffer = self._results.take(num_values)
        computed = self._device.compute.record()
        if num_values:
            self._device.results.wait_for(computed)
            target = buffer.tensor[:num_values]
            self._device.results.run(lambda: target.copy_(step.told.tensor, non_blocking=True))
            computed = self._device.results.record()
        return _StepUnderWay(
            step, buffer, computed, self._results, self._clock, launched_ns, self._cache.last_moved_step()
        )

    # Operations of the compute stream

    @torch.inference_mode()
    def _compute(self, step: "_Step", inputs: StepInputs, sampling: PackedSampling) -> None:
        """Any mix of rows."""
        packed = step.packed.tensor
        hidden = self._forward(inputs.gather(packed, self._device_table))
        prompts: list[Tensor] = []
        for chunk in step.chunks:
            told = self._device_table.token_ids[chunk.slot, chunk.first : chunk.first + chunk.num]
            prompts += chunk.compute(hidden, told, self._model.compute_logits)
        if step.sampling.num_rows:
            logits = self._model.compute_logits(hidden.index_select(0, packed[inputs.sampling_indices]))
            self._sample(step, logits, sampling, prompts)
        elif prompts:
            step.told.put(flatten_to_int32(prompts))

    @torch.inference_mode()
    def _sample(self, step: "_Step", logits: Tensor, sampling: PackedSampling, others: list[Tensor]) -> None:
        """`others` are told behind the samples."""
        packed, table = step.packed.tensor, self._device_table
        token_counts = table.token_counts if sampling.is_penalized else None
        columns = sampling.columns(packed, table)
        sampled = self._sampler.sample(logits, columns, token_counts, sampling.max_reported)
        step.told.put(flatten_to_int32([*sampling.keep(sampled, packed, table), *others]))

    @torch.inference_mode()
    def _decode(self, buffers: DecodeBuffers) -> None:
        """What the first graph of a batch size holds."""
        hidden = self._forward(buffers.inputs.gather(self._device_table))
        buffers.logits.copy_(self._model.compute_logits(hidden))

    @torch.inference_mode()
    def _sample_decoded(self, buffers: DecodeBuffers) -> None:
        """What the second graph holds: rows that ask for a token and no more."""
        inputs, table = buffers.inputs, self._device_table
        columns = table.sampling_columns(inputs.aligned_slots, inputs.seq_lens)
        sampled = self._sampler.sample(buffers.logits, columns, None, None)
        table.token_ids[inputs.slots.long(), inputs.seq_lens.long()] = sampled.token_ids.int()
        buffers.sampled.copy_(torch.stack([sampled.token_ids, sampled.is_nan.long()]))

    def _forward(self, batch: DeviceBatch) -> Tensor:
        attend = self._backend.prepare(batch.attention, self._cache.layers)
        return self._model.forward(batch.token_ids, batch.positions, attend)


def _apply(edit: Edit, packed: OnDevice) -> None:
    edit(packed.tensor)


@dataclass(slots=True)
class _Step:
    """A step as it is put on the device, and what its operations leave to one another."""

    plan: StepPlan
    rows: WorkingRows
    sampling: StepSampling
    upload: Upload = field(default_factory=Upload)
    packed: OnDevice = field(default_factory=OnDevice)  # the upload
    told: OnDevice = field(default_factory=OnDevice)  # what the host reads: `sampling`, then `chunks`
    chunks: Sequence[PromptChunk] = ()


@dataclass(frozen=True, slots=True)
class _StepUnderWay:
    """See `LaunchedStep`. Holds what the copy to the host reads and writes."""

    step: _Step
    buffer: PinnedBuffer
    done: Event
    results: ResultBuffers
    clock: "_StepClock"
    launched_ns: int
    last_moved_step: int  # when it was launched

    def is_done(self) -> bool:
        return self.done.is_done()

    def result(self) -> StepResult:
        self.done.wait()
        duration_us = self.clock.duration_us(self.launched_ns)
        reading = Reading(self.buffer.array)
        samples = self.step.sampling.read(reading)
        prompt_logprobs = tuple(chunk.read(reading) for chunk in self.step.chunks)
        self.results.give_back(self.buffer)
        return StepResult(
            epoch=self.step.plan.epoch,
            step=self.step.plan.step,
            statuses=samples.statuses,
            token_ids=samples.token_ids,
            logprobs=samples.logprobs,
            candidates=samples.candidates,
            prompt_logprobs=prompt_logprobs,
            duration_us=duration_us,
            last_moved_step=self.last_moved_step,
            parts=StepParts(model_us=duration_us),
        )


@dataclass(frozen=True, slots=True)
class _PartsUnderWay:
    """A step in parts, as `LaunchedStep`."""

    plan: StepPlan
    outline: StepOutline
    parts: list[StepPart[LaunchedStep]]

    def is_done(self) -> bool:
        return all(part.result.is_done() for part in self.parts)

    def result(self) -> StepResult:
        parts = [StepPart(part.rows, part.result.result()) for part in self.parts]
        duration_us = sum(part.result.duration_us for part in parts)
        return replace(
            join_results(self.plan, self.outline, parts),
            duration_us=duration_us,
            last_moved_step=max((part.result.last_moved_step for part in parts), default=0),
            parts=StepParts(model_us=duration_us),
        )


class _StepClock:
    """Tells how long steps took that follow each other on a device."""

    def __init__(self) -> None:
        self._last_done_ns = 0

    def duration_us(self, launched_ns: int) -> int:
        """Of a step that is done now: since it was launched, or the one before was done if that was later."""
        began_ns, self._last_done_ns = max(launched_ns, self._last_done_ns), time.perf_counter_ns()
        return (self._last_done_ns - began_ns) // 1000
