"""The block tables on a device compared with the tables of the host, after random plans."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan
from tests.worker.fake_device import CPU
from worker_service.device.kernels import REFERENCE
from worker_service.device.staging import Upload
from worker_service.device.table import DeviceTable
from worker_service.rows.table import SequenceTable, TableLimits

MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS = 3, 4, 500


class RandomPlans:
    """Random plans over a table that change block tables: openings, forks, releases, appended and set blocks."""

    def __init__(self, rng: random.Random, table: SequenceTable) -> None:
        self._rng = rng
        self._table = table
        self._steps = 0

    def next(self) -> StepPlan:
        rng, table, limits = self._rng, self._table, self._table.limits
        self._steps += 1
        rows = [slot for slot in range(MAX_NUM_SEQS) if table.occupied[slot]]
        vacant = [slot for slot in range(MAX_NUM_SEQS) if slot not in rows]
        released = [slot for slot in rows if rng.random() < 0.2]
        opened = [self._opening(slot) for slot in vacant if rng.random() < 0.4]
        kept = [slot for slot in rows if slot not in released] + [opening.slot for opening in opened]
        sources = [rng.choice(kept)] if kept and rng.random() < 0.3 else []
        targets = [rng.randrange(MAX_NUM_SEQS)] if sources else []
        # Tables that the plan does not replace, with the number of blocks that they have.
        lengths = {
            int(number): int(table.num_blocks[number])
            for slot in rows
            if slot not in (*released, *targets)
            for number in limits.tables_of(slot)
        }
        able = [number for number, length in lengths.items() if length < limits.max_num_blocks - 1]
        appended = [rng.choice(able) for _ in range(rng.randrange(3))] if able else []
        replaced = [number for number, length in lengths.items() if length and rng.random() < 0.3]
        return StepPlan(
            epoch=1,
            step=self._steps,
            released_slots=tuple(released),
            openings=tuple(opened),
            fork_source_slots=tuple(sources),
            fork_target_slots=tuple(targets),
            append_tables=tuple(appended),
            append_block_ids=self._blocks(len(appended)),
            set_block_tables=tuple(replaced),
            set_block_indexes=tuple(rng.randrange(lengths[number]) for number in replaced),
            set_block_ids=self._blocks(len(replaced)),
        )

    def _blocks(self, num: int) -> tuple[int, ...]:
        return tuple(self._rng.randint(1, NUM_BLOCKS) for _ in range(num))

    def _opening(self, slot: int) -> RowOpening:
        """Return a row whose windows have passed some blocks, and whose tables end at different lengths."""
        num_computed, limits = self._rng.randrange(30), self._table.limits
        tables: list[Sequence[int]] = []
        for window in limits.windows:
            passed = self._rng.randint(0, limits.first_block(num_computed, window))
            num_blocks = -(-(num_computed + 1) // BLOCK_SIZE) + self._rng.randrange(2)
            tables.append((0,) * passed + self._blocks(num_blocks - passed))
        return RowOpening(
            slot=slot,
            sequence_id=slot,
            token_ids=(1,) * (num_computed + 1),
            num_prompt_tokens=1,
            num_computed_tokens=num_computed,
            block_ids=tuple(block for blocks in tables for block in blocks),
            sampling=SamplingParams(),
            seed=0,
            sample_index=0,
            table_lengths=tuple(map(len, tables)) if len(tables) > 1 else (),
        )


@pytest.mark.parametrize("windows", [(0,), (0, 9), (0, 9, 9, 3)])
def test_every_table_is_as_on_the_host(windows: tuple[int, ...]) -> None:
    rng = random.Random(len(windows))
    limits = TableLimits(MAX_NUM_SEQS, 8, 64, BLOCK_SIZE, NUM_BLOCKS, vocab_size=10, windows=windows)
    table, device_table = SequenceTable(limits), DeviceTable(limits, CPU, REFERENCE)
    plans, num_compared = RandomPlans(rng, table), 0
    for _ in range(60):
        plan, upload = plans.next(), Upload()
        table.apply(plan)
        edits = device_table.plan_edits(plan, table, upload)
        if upload.size:
            packed = np.empty(upload.size, np.int32)
            upload.write(packed)
            for edit in edits:
                edit(torch.from_numpy(packed))
        for number in limits.tables_of(np.flatnonzero(table.occupied)).ravel():
            length = table.num_blocks[number]
            held = device_table.block_tables[number // MAX_NUM_SEQS, number % MAX_NUM_SEQS, :length]
            assert held.tolist() == table.block_tables[number, :length].tolist()
            num_compared += 1
        assert not device_table.block_tables[:, device_table.scratch_slot].any()
    assert num_compared > 60 * len(windows)
