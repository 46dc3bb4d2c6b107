"""The row table on the device, by slot: tokens, block tables, sampling parameters and token counts.

It is the counterpart of `SequenceTable`, which checks a plan and knows every count. Only the device knows the tokens
that it sampled. The next step reads them from this table, so a plan can be launched before the result of the previous
plan is known.

A plan's changes are uploaded as the values that the host's table has after the plan. Unchanged rows cost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import RowOpening, StepPlan
from pagewire.kernels.gathering import GatheredTokens, RowTables
from pagewire.kernels.sampling import FLOATS, INTEGERS, SampledTokens, SamplingColumns, TokenTarget
from worker_service.device.kernels import Sampler
from worker_service.device.staging import Upload
from worker_service.rows import SequenceTable, StepSampling, TableLimits, has_penalties

# A change of the table that reads the step's packed upload. It runs on the compute stream.
Edit = Callable[[Tensor], None]


class DeviceTable:
    """The GPU's copy of the state of all running sequences, as tensors indexed by slot.

    No sequence uses slot `max_num_seqs`, the scratch slot. The padding of CUDA graphs reads and writes it.

    Attributes:
        token_ids: [max_num_seqs + 1, max_model_len + 1] int32.
        block_tables: [G, max_num_seqs + 1, max_num_blocks] int32, the tables of each layer group; entries beyond a
            row's blocks are undefined.
        token_counts: [max_num_seqs + 1, vocab_size] int32, in the format of `pagewire.kernels.sampling.sample`, for
            rows that have penalties. The tensor is allocated at once, so that the memory measurement includes it.
    """

    def __init__(self, limits: TableLimits, device: torch.device, sampler: Sampler) -> None:
        num_slots = limits.max_num_seqs + 1
        self.scratch_slot = limits.max_num_seqs
        self._limits = limits
        self._sampler = sampler
        self.token_ids = torch.zeros((num_slots, limits.max_model_len + 1), dtype=torch.int32, device=device)
        table_shape = (len(limits.windows), num_slots, limits.max_num_blocks)
        self.block_tables = torch.zeros(table_shape, dtype=torch.int32, device=device)
        self.token_counts = torch.zeros((num_slots, limits.vocab_size), dtype=torch.int32, device=device)
        self._lines = torch.zeros((len(FLOATS) + len(INTEGERS), num_slots), dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def tokens(
        self, slots: Tensor, lengths: Tensor, row_slots: Tensor, num_blocks: int | None = None
    ) -> GatheredTokens:
        """Copy the tokens to compute and the block tables of a step's sequences into dense tensors.

        The GPU keeps this state for all running sequences.

        If `num_blocks` is None, the block tables have their full width. See `pagewire.kernels.gathering.gather_tokens`.
        """
        tables = RowTables(self.token_ids, self.block_tables, self._limits.block_size)
        num_blocks = self._limits.max_num_blocks if num_blocks is None else num_blocks
        return self._sampler.gather_tokens(tables, slots, lengths, row_slots, num_blocks)

    def sampling_columns(self, slots: Tensor, num_tokens: Tensor) -> SamplingColumns:
        """Gather the sampling parameters of some sequences from the GPU's table, without biases and stop tokens.

        See `pagewire.kernels.gathering.gather_columns`.
        """
        return self._sampler.gather_columns(self._lines, self._seeds, slots, num_tokens)

    def target(self, slots: Tensor, sampled: Tensor) -> TokenTarget:
        """Return the memory to which the sampler writes the tokens of the sequences in `slots` [R] int32.

        The sampler writes the tokens to the table, and also to `sampled` [2, R] int32.
        """
        return TokenTarget(self.token_ids, slots, sampled)

    def plan_edits(self, plan: StepPlan, table: SequenceTable, upload: Upload) -> list[Edit]:
        """Return the operations that apply a step plan's changes to the GPU's table, in the order to run them.

        `table` is the host's table, to which the plan has been applied already. The values that the operations read are
        added to `upload`.
        """
        edits: list[Edit] = []
        changed = [*(opening.slot for opening in plan.openings), *plan.fork_target_slots]
        if changed:
            edits.append(self._set_parameters(np.unique(changed), table, upload))
        if changed or plan.append_tables or plan.set_block_tables:
            edits.append(self._set_blocks(plan, changed, table, upload))
        if plan.openings:
            edits += self._open(plan.openings, upload)
        if plan.fork_target_slots:
            edits.append(self._fork(plan, upload))
        if plan.append_token_slots:
            edits.append(self._append_tokens(plan, table, upload))
        return edits

    def _set_parameters(self, slots: NDArray, table: SequenceTable, upload: Upload) -> Edit:
        sampling = table.sampling
        lines = upload.add(sampling.lines[:, slots])
        seeds = sampling.seeds[slots]
        seed_low, seed_high = upload.add(seeds & np.uint64(0xFFFFFFFF)), upload.add(seeds >> np.uint64(32))
        place = upload.add(slots)

        def edit(packed: Tensor) -> None:
            indexes = packed[place].long()
            self._lines.index_copy_(1, indexes, packed[lines].view(len(self._lines), -1))
            high = packed[seed_high].long() << 32
            self._seeds.index_copy_(0, indexes, high | (packed[seed_low].long() & 0xFFFFFFFF))

        return edit

    def _set_blocks(self, plan: StepPlan, changed: Sequence[int], table: SequenceTable, upload: Upload) -> Edit:
        """Return an operation that updates block tables on the GPU.

        It writes all blocks of new and forked sequences, and only the appended and replaced blocks of other sequences.
        An entry may be written twice, with the same value.
        """
        whole = self._limits.tables_of(np.unique(np.array(changed, np.int64))).ravel()
        appended, num_appended = np.unique(np.array(plan.append_tables, np.int64), return_counts=True)
        num_blocks = np.concatenate([table.num_blocks[whole], num_appended])
        firsts = np.concatenate([np.zeros_like(whole), table.num_blocks[appended] - num_appended])
        tables = np.concatenate([np.repeat([*whole, *appended], num_blocks), plan.set_block_tables]).astype(np.int64)
        indexes = np.concatenate([_ranges(firsts, num_blocks), plan.set_block_indexes]).astype(np.int64)
        # Each layer group has one more table here, for the scratch slot.
        places = tables + tables // self._limits.max_num_seqs
        return _write(self.block_tables.flatten(0, 1), places, indexes, table.block_tables[tables, indexes], upload)

    def _open(self, openings: Sequence[RowOpening], upload: Upload) -> list[Edit]:
        lengths = np.array([len(opening.token_ids) for opening in openings])
        slots = np.repeat([opening.slot for opening in openings], lengths)
        token_ids = np.concatenate([np.array(opening.token_ids, np.int64) for opening in openings])
        edit = _write(self.token_ids, slots, _ranges(np.zeros_like(lengths), lengths), token_ids, upload)
        penalized = [opening for opening in openings if has_penalties(opening.sampling)]
        return [edit, self._count(penalized, upload)] if penalized else [edit]

    def _count(self, openings: Sequence[RowOpening], upload: Upload) -> Edit:
        lengths = [len(opening.token_ids) for opening in openings]
        slots = upload.add([opening.slot for opening in openings])
        token_ids = upload.add(np.concatenate([np.array(opening.token_ids, np.int64) for opening in openings]))
        start_loc = upload.add(np.cumsum([0, *lengths]))
        num_prompt_tokens = upload.add([opening.num_prompt_tokens for opening in openings])

        def edit(packed: Tensor) -> None:
            columns = (packed[slots], packed[token_ids], packed[start_loc], packed[num_prompt_tokens])
            self._sampler.count_tokens(self.token_counts, *columns)

        return edit

    def _fork(self, plan: StepPlan, upload: Upload) -> Edit:
        """Return an operation that copies the tokens and token counts of forked sequences on the GPU.

        All sources are read before any target is written.
        """
        sources, targets = upload.add(plan.fork_source_slots), upload.add(plan.fork_target_slots)

        def edit(packed: Tensor) -> None:
            rows, others = packed[sources].long(), packed[targets].long()
            self.token_ids.index_copy_(0, others, self.token_ids.index_select(0, rows))
            self.token_counts.index_copy_(0, others, self.token_counts.index_select(0, rows))

        return edit

    def _append_tokens(self, plan: StepPlan, table: SequenceTable, upload: Upload) -> Edit:
        slots = np.array(plan.append_token_slots, np.int64)
        where = upload.add(np.stack([slots, table.num_tokens[slots] - 1]))
        values = upload.add(plan.append_token_ids)
        increments = upload.add(2 * table.sampling.is_penalized[slots])

        def edit(packed: Tensor) -> None:
            rows, columns = packed[where].long().view(2, -1)
            self.token_ids[rows, columns] = packed[values]
            counted = (rows, packed[values].long())
            self.token_counts[counted] = self.token_counts[counted] + packed[increments]

        return edit


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """The slices of a step's upload that contain the sampling parameters of its sequences."""

    sampling: StepSampling
    slots: slice
    num_tokens: slice
    write_slots: slice  # slots to write tokens to: the scratch slot for rows that keep no token
    uncounted: slice  # amounts to subtract from the counts of tokens that rows do not keep
    edits: dict[str, slice]  # by the names in `StepSampling.edits`

    @staticmethod
    def pack(sampling: StepSampling, upload: Upload, scratch_slot: int) -> "PackedSampling":
        return PackedSampling(
            sampling=sampling,
            slots=upload.add(sampling.slots),
            num_tokens=upload.add(sampling.num_tokens),
            write_slots=upload.add(np.where(sampling.discards_token, scratch_slot, sampling.slots)),
            uncounted=upload.add(2 * (sampling.discards_token & sampling.is_penalized)),
            edits={name: upload.add(column) for name, column in sampling.edits.items()},
        )

    @property
    def is_penalized(self) -> bool:
        return bool(self.sampling.is_penalized.any())

    def columns(self, packed: Tensor, table: DeviceTable) -> SamplingColumns:
        columns = table.sampling_columns(packed[self.slots], packed[self.num_tokens])
        return columns._replace(**{name: self._edit(name, packed) for name in self.edits})

    def _edit(self, name: str, packed: Tensor) -> Tensor:
        column = self.sampling.edits[name]
        bits = packed[self.edits[name]].view(column.shape)
        return bits.view(torch.float32) if column.dtype == np.float32 else bits

    def target(self, packed: Tensor, table: DeviceTable) -> TokenTarget:
        """Return the memory on the GPU to which the sampler writes the step's tokens."""
        slots = packed[self.write_slots]
        return table.target(slots, slots.new_empty(2, len(slots)))

    def uncount(self, sampled: SampledTokens, packed: Tensor, table: DeviceTable) -> None:
        """Subtract sampled tokens that their sequences do not keep from the token counts that penalties use.

        The sampler counts every token that it samples for a sequence with penalties.
        """
        if self.is_penalized:
            counted = (packed[self.slots].long(), sampled.token_ids)
            table.token_counts[counted] = table.token_counts[counted] - packed[self.uncounted] * ~sampled.is_nan


def _write(table: Tensor, places: NDArray, indexes: NDArray, values: NDArray, upload: Upload) -> Edit:
    """Return an operation for the GPU that writes values[i] to table[places[i], indexes[i]] for every i.

    The arrays are added to `upload`.
    """
    where, written = upload.add(np.stack([places, indexes])), upload.add(values)

    def edit(packed: Tensor) -> None:
        rows, columns = packed[where].long().view(2, -1)
        table[rows, columns] = packed[written]

    return edit


def _ranges(firsts: NDArray, lengths: NDArray) -> NDArray:
    """Return the concatenation of ranges of integers. Range i has lengths[i] numbers, from firsts[i] on."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(firsts - starts, lengths)
