import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepPlan
from pagewire.kernels.cpu import FlatRows
from worker_service.host.computation import BatchBuilder
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.rows.working_rows import WorkingRows
from worker_service.startup.cpu_kernels import load_cpu_kernels

LIMITS = TableLimits(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=20, block_size=4, num_device_blocks=10, vocab_size=100
)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_rows_lie_one_after_the_other_in_slot_order(has_kernels: bool) -> None:
    table = SequenceTable(LIMITS)
    builder = BatchBuilder(table, load_cpu_kernels() if has_kernels else None)
    greedy = SamplingParams()
    rows = table.apply(
        StepPlan(
            1,
            1,
            openings=(
                RowOpening(3, 1, tuple(range(10, 17)), 7, 0, (5, 2), greedy, 0, 0),
                RowOpening(1, 2, tuple(range(30, 40)), 10, 6, (9, 1, 7, 8), greedy, 0, 0),
                RowOpening(0, 3, (50,), 1, 0, (3,), greedy, 0, 0),
            ),
            work_slots=(3, 1, 0),
            work_num_tokens=(5, 4, 1),
        )
    )
    batch = builder.build(rows)
    assert batch.token_ids.tolist() == [50, 36, 37, 38, 39, 10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [0, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert batch.paged.query_start_loc.tolist() == [0, 1, 5, 10]
    assert batch.paged.seq_lens.tolist() == [1, 10, 5]
    assert batch.paged.slot_mapping.tolist() == [[12, 6, 7, 28, 29, 20, 21, 22, 23, 8]]
    # As wide as the longest row of the step: row 1 does not need its last block yet.
    assert batch.paged.block_tables.tolist() == [[[3, 0, 0], [9, 1, 7], [5, 2, 0]]]
    assert batch.sampling_indices.tolist() == [0, 4]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.paged.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize("windows", [(0,), (0, 7, 5)])
def test_batches_of_random_rows_are_those_of_numpy(windows: tuple[int, ...]) -> None:
    """Batches of random rows equal numpy's, while the tables grow and their buffers are reused or replaced."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    table = SequenceTable(replace(LIMITS, windows=windows))
    table.token_ids[:] = rng.integers(0, 100, table.token_ids.shape)
    table.block_tables[:] = rng.integers(1, 11, table.block_tables.shape)
    in_c, in_numpy = BatchBuilder(table, load_cpu_kernels()), BatchBuilder(table, None)
    for _ in range(200):
        num_rows = rng.integers(1, 5)
        starts, samples = rng.integers(0, 17, num_rows), rng.integers(0, 2, num_rows).astype(bool)
        num_new_tokens = rng.integers(1, 4, num_rows) if rng.integers(2) else np.ones(num_rows, np.int64)
        slots = np.sort(rng.permutation(4)[:num_rows])
        rows = WorkingRows(slots, starts, num_new_tokens, samples)
        assert values_of(in_c.build(rows)) == values_of(in_numpy.build(rows))


def values_of(batch: FlatRows) -> list:
    rows = batch.paged
    tensors = [batch.token_ids, batch.positions, batch.sampling_indices]
    tensors += [rows.query_start_loc, rows.seq_lens, rows.block_tables, rows.slot_mapping]
    return [(each.shape, each.dtype, each.tolist()) for each in tensors]
