import torch

from worker_service.host.batch import build_batch
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.step import RowOpening, SamplingParams, StepPlan

LIMITS = TableLimits(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=20, block_size=4, num_device_blocks=10, vocab_size=100
)


def test_rows_lie_one_after_the_other_in_slot_order() -> None:
    table = SequenceTable(LIMITS)
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
    batch = build_batch(table, rows)
    assert batch.token_ids.tolist() == [50, 36, 37, 38, 39, 10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [0, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert batch.attention.query_start_loc == [0, 1, 5, 10]
    assert batch.attention.seq_lens == [1, 10, 5]
    assert batch.attention.slot_mapping.tolist() == [12, 6, 7, 28, 29, 20, 21, 22, 23, 8]
    # As wide as the longest row of the step: row 1's last block is not needed yet.
    assert batch.attention.block_tables.tolist() == [[3, 0, 0], [9, 1, 7], [5, 2, 0]]
    assert batch.sampling_indices.tolist() == [0, 4]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.attention.slot_mapping.dtype == torch.int64
