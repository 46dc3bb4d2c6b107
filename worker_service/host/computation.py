"""Computation of rows on the CPU: batch -> attention -> model -> logits -> sampler -> table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import PromptLogprobs, RowStatus
from pagewire.kernels.cpu import CpuKernels, FlatRows, PagedRows, TableFlattener
from pagewire.kernels.cpu.sampler import CpuSampler, TableSampler, TokenHistory, TorchSampler, highest_logits
from worker_service.attention import AttentionBackend, AttentionBatch, CpuAttention, LayerCache
from worker_service.host.cpu_decoder import CpuDecoder
from worker_service.models.decoder import Decoder, Outputs
from worker_service.models.torch_operations import Attend
from worker_service.rows import (
    BegunStep,
    PartStates,
    Pooler,
    Samples,
    SequenceTable,
    StepWatch,
    ValueReader,
    WorkingRows,
    choosing_rows,
    pooled_chunks,
    prompt_chunks,
    read_embeddings,
    row_statuses,
)
from worker_service.step import FinishedStep


class HostComputation:
    """The computation of a model's steps on a CPU. It implements the interface `Computation` and has no CUDA graphs."""

    num_graphs = 0

    def __init__(
        self,
        model: CpuDecoder | Decoder,
        layers: Sequence[LayerCache],
        backend: AttentionBackend,
        table: SequenceTable,
        kernels: CpuKernels | None,
        pooler: Pooler,
        states: Tensor | None = None,
    ) -> None:
        """Create the computation. `layers` are the KV cache's tensors for each layer of the model.

        The C kernels build the batches and sample the tokens. If `kernels` is None, numpy and plain torch do so
        instead. `states` is the memory of the rows' states, see `CacheEngine`; None: the model has no states.
        """
        self.table = table
        self._states = states
        self._has_overwritten = False  # whether the current part has overwritten states that its rows read
        self._batches = BatchBuilder(table, kernels)
        self._model = model
        self._layers = layers
        self._backend = backend
        self._pooler = pooler
        self._history = TokenHistory(table.token_ids, table.num_prompt_tokens)
        self._sampler: CpuSampler | TorchSampler = TorchSampler()
        self._table_sampler: TableSampler | None = None
        if kernels is not None:
            self._sampler = CpuSampler(kernels.library)
            self._table_sampler = self._sampler.of_table(table.sampling.all_columns(), self._history)

    def capture_graphs(self, sum_of_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Do nothing, because a CPU has no CUDA graphs. See `Computation.capture_graphs`."""

    def drop_graphs(self) -> None:
        """Do nothing, because a CPU has no CUDA graphs. See `Computation.drop_graphs`."""

    def run_graphs_uncaptured(self) -> None:
        """Do nothing, because a CPU has no CUDA graphs. See `Computation.run_graphs_uncaptured`."""

    def prepare(self, step: BegunStep, rows: WorkingRows) -> Callable[[], FinishedStep]:
        """Return a function that computes the sequences in `rows`, which may be empty. See `Computation.prepare`.

        The computation reads the host's table of sequences directly, so there is no copy of the table to update.
        """
        return partial(self.launch, step, rows)

    def launch(self, step: BegunStep, rows: WorkingRows) -> FinishedStep:
        """Compute a step, or a part of a step, and return it as a finished step. See `Computation.launch`.

        Raises RuntimeError, which ends the session, if the part fails after it has overwritten states that it reads.
        """
        self._has_overwritten = False
        try:
            samples, prompt_logprobs = self._compute(rows, step.watch) if len(rows.slots) else (Samples(()), ())
        except Exception as error:
            if not self._has_overwritten:
                raise
            raise RuntimeError("a step failed after it had overwritten states of its rows") from error
        return FinishedStep(step.result(samples, prompt_logprobs, *step.watch.take()))

    def synchronize(self) -> None:
        """Do nothing, because steps are done when `launch` returns. See `Computation.synchronize`."""

    @torch.inference_mode()
    def _compute(self, rows: WorkingRows, watch: StepWatch) -> tuple[Samples, tuple[PromptLogprobs, ...]]:
        chosen = choosing_rows(self.table, rows)
        flat = self._batches.build(chosen)
        attend = self._prepare(flat.paged)
        watch.end("batch")
        states = None if self._states is None else self.table.states.of_part(rows)
        hidden, logits, highest, times = self._forward(flat, attend, states)
        watch.end("model", times)
        prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        if rows.are_plain:
            samples = self._sample_highest(rows, logits, highest)
        elif self._table_sampler is not None and self.table.sampling.takes_token[rows.slots].all():
            samples = self._sample_tokens(self._table_sampler, rows, logits, highest)
        else:
            samples, prompt_logprobs = self._sample(chosen, hidden, logits, highest)
            samples = self._pool(chosen, hidden, samples)
        watch.end("sampling")
        if states is not None:
            self.table.states.advance(states)
        return samples, prompt_logprobs

    def _forward(self, flat: FlatRows, attend: Attend, states: PartStates | None) -> Outputs:
        """Run the model, and record when it can no longer be repeated because it has overwritten states.

        The C kernels allocate all memory before they write. Plain torch allocates memory for each operation.
        """
        overwrites = states is not None and states.overwrites
        self._has_overwritten = overwrites and not isinstance(self._model, CpuDecoder)
        rows = None
        if states is not None:
            assert self._states is not None
            rows = states.rows(self._states, flat.paged.query_start_loc)
        outputs = self._model.forward_logits(flat.token_ids, flat.positions, attend, flat.sampling_indices, rows)
        self._has_overwritten = overwrites
        return outputs

    def _prepare(self, rows: PagedRows) -> Attend:
        """Prepare the attention of a step. Return the function that each layer of the model calls.

        The C kernels read `rows` directly. Other attention backends need an `AttentionBatch`.
        """
        if isinstance(self._backend, CpuAttention):
            return self._backend.prepare_rows(rows, self._layers)
        lists = rows.query_start_loc.tolist(), rows.seq_lens.tolist()
        return self._backend.prepare(AttentionBatch(*lists, rows.block_tables, rows.slot_mapping), self._layers)

    def _sample_highest(self, rows: WorkingRows, logits: Tensor, highest: Tensor | None) -> Samples:
        """Sample the tokens of a step in which every sequence chooses the token with its highest logit.

        No sequence may request other results. This avoids torch, whose operations would take longer than the rest of
        the sampling.
        """
        token_ids = (highest_logits(logits) if highest is None else highest).numpy()
        chosen = token_ids.tolist()
        if min(chosen, default=0) < 0:
            return self._store_tokens(rows, np.maximum(token_ids, 0), token_ids < 0)
        self.table.put_tokens(rows, token_ids)
        return Samples((), tuple(chosen))

    def _sample_tokens(
        self, sampler: TableSampler, rows: WorkingRows, logits: Tensor, highest: Tensor | None
    ) -> Samples:
        """Sample the tokens of a step in which every sequence returns one token and no other result.

        Grammar masks are applied.
        """
        slots, ends = rows.slots[rows.samples], rows.ends[rows.samples]
        masks = self.table.masks.of_step(slots)
        if masks is None:
            return self._store_tokens(rows, *sampler.sample_tokens(logits, slots, ends, highest))
        token_ids, is_nan = sampler.sample_tokens(logits, slots, ends, highest, (masks.masks, masks.lines))
        masks.consume(token_ids, ~is_nan)
        failures = masks.failures()
        is_nan[list(failures)] = True
        return self._store_tokens(rows, token_ids, is_nan, failures)

    def _store_tokens(
        self,
        rows: WorkingRows,
        token_ids: NDArray[np.int64],
        is_bad: NDArray[np.bool_],
        failures: Mapping[int, RowStatus] | None = None,
    ) -> Samples:
        """Append sampled tokens to the table of sequences. Return the samples of the step: only these tokens.

        `is_bad` marks the sequences without a valid token. `failures` has their statuses by index in the step. A marked
        sequence without an entry in `failures` has NaN logits.
        """
        self.table.put_tokens(rows, token_ids)
        return Samples(row_statuses(is_bad, failures), tuple(token_ids[~is_bad].tolist()))

    def _pool(self, rows: WorkingRows, hidden: Tensor, samples: Samples) -> Samples:
        """Compute the embeddings of the sequences that request one, and add them to the step's other samples."""
        chunks = pooled_chunks(self.table, rows)
        embeddings, sums = self._pooler.pool(hidden, chunks)
        self._pooler.keep(chunks, sums)
        if not embeddings:
            return samples
        reading, slots = ValueReader.of(embeddings), rows.slots[rows.samples]
        return read_embeddings(samples, slots, chunks, reading, len(embeddings[0]))

    def _sample(
        self, rows: WorkingRows, hidden: Tensor, logits: Tensor, highest: Tensor | None
    ) -> tuple[Samples, tuple[PromptLogprobs, ...]]:
        table, sampling = self.table, self.table.sampling_of(rows)
        columns = table.sampling.columns(sampling)
        sampled = self._sampler.sample(logits, columns, self._history, sampling.max_reported, highest)
        chunks = prompt_chunks(table, rows)
        results = sampling.results(sampled, logits)
        for chunk in chunks:
            tokens = torch.from_numpy(table.token_ids[chunk.tokens])
            results += chunk.compute(hidden, tokens, self._model.compute_logits)
        reading = ValueReader.of(results)
        samples = sampling.read(reading)
        table.put_tokens(rows, sampled.token_ids.numpy())
        return samples, tuple(chunk.read(reading) for chunk in chunks)


class BatchBuilder:
    """A builder of the flat tensors of a step, such as token ids and positions, from the table of sequences.

    The new tokens of the rows are concatenated in slot order. The returned tensors are overwritten by the next call.
    """

    def __init__(self, table: SequenceTable, kernels: CpuKernels | None) -> None:
        """Create a builder for a table of sequences. If `kernels` is None, numpy is used instead of the C kernels.

        The C kernels flatten all sequences in one call.
        """
        self._table = table
        self._flattener: TableFlattener | None = None
        if kernels is not None:
            block_size = table.limits.block_size
            self._flattener = TableFlattener(kernels.library, table.token_ids, table.block_tables, block_size)

    def build(self, rows: WorkingRows) -> FlatRows:
        """Return the flat tensors of a step for the given sequences. There must be at least one sequence."""
        num_blocks = -(-int(rows.ends.max()) // self._table.limits.block_size)
        if self._flattener is None:
            return _flatten(self._table, rows, num_blocks)
        return self._flattener.flatten(rows.slots, rows.starts, rows.num_new_tokens, rows.samples, num_blocks)


def _flatten(table: SequenceTable, rows: WorkingRows, num_blocks: int) -> FlatRows:
    block_size = table.limits.block_size
    slots, positions, query_start_loc = rows.flatten()
    tables = table.limits.tables_of(slots)
    block_ids = table.block_tables[tables, positions // block_size].astype(np.int64)
    paged = PagedRows(
        query_start_loc=torch.from_numpy(query_start_loc.astype(np.int32)),
        seq_lens=torch.from_numpy(rows.ends.astype(np.int32)),
        block_tables=torch.from_numpy(table.block_tables[table.limits.tables_of(rows.slots), :num_blocks]),
        slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size),
    )
    return FlatRows(
        token_ids=torch.from_numpy(table.token_ids[slots, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        paged=paged,
        sampling_indices=torch.from_numpy(query_start_loc[1:][rows.samples] - 1),
    )
