"""The specification, in plain torch, of gathering a step's inputs from the tables of rows, which are indexed by
slot."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.sampling import SamplingColumns

# The start of a column is a multiple of 16 bytes, in int32 elements: Triton recompiles a kernel for other alignments.
ALIGNMENT = 4


class RowTables(NamedTuple):
    """The tokens and block tables of all rows in a worker. A row is the worker's state of one running sequence, and its
    slot is its index in these tables.

    Attributes:
        token_ids: [num_slots, max_len] int32.
        block_tables: [G, num_slots, max_blocks] int32, the block ids of each layer group.
        block_size: positions per block of the cache.
    """

    token_ids: Tensor
    block_tables: Tensor
    block_size: int


class GatheredTokens(NamedTuple):
    """The new tokens of a step, in the order of the step, with the positions in the KV cache to which their keys and
    values are written.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the position of each token in its row.
        slot_mapping: [G, T] int64, `block_id * block_size + offset` of each token in each layer group; -1 for padding.
        block_tables: [G, S, num_blocks] int32, the block table of each row in each layer group.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor


def gather_tokens(
    tables: RowTables, slots: Tensor, lengths: Tensor, row_slots: Tensor, num_blocks: int
) -> GatheredTokens:
    """Collect the inputs of a step from the tables of all rows: the new tokens, their positions, their KV cache slots,
    and the block tables.

    Args:
        tables: the tables to read.
        slots: [T] int32, the slot of each token's row.
        lengths: [T] int32, the number of tokens of that row up to and including this token. 0 means that the token is
            padding, and the first token of the row is read.
        row_slots: [S] int32, the slot of each row of the step.
        num_blocks: number of entries to copy from each block table, at most max_blocks.
    """
    indexes, positions = slots.long(), (lengths.long() - 1).clamp(min=0)
    blocks = tables.block_tables[:, indexes, positions // tables.block_size].long()
    slot_mapping = blocks * tables.block_size + positions % tables.block_size
    return GatheredTokens(
        token_ids=tables.token_ids[indexes, positions].long(),
        positions=positions,
        slot_mapping=slot_mapping.masked_fill(lengths == 0, -1),
        block_tables=tables.block_tables[..., :num_blocks].index_select(1, row_slots),
    )


def gather_columns(lines: Tensor, seeds: Tensor, slots: Tensor, num_tokens: Tensor) -> SamplingColumns:
    """Look up the sampling parameters of the rows (running sequences) of a step, in a table of all rows. Logit biases,
    stop tokens and masks are not in the table.

    Args:
        lines: [len(FLOATS) + len(INTEGERS), num_slots] int32, one line per parameter. A float is stored as the int32
            number with the same bits.
        seeds: [num_slots] int64.
        slots: [R] int32, the slot of each row.
        num_tokens: [R] int32, the number of tokens of each row. The result contains it unchanged.
    """
    num_rows = len(slots)
    padded = F.pad(slots, (0, -num_rows % ALIGNMENT))  # so that each column starts at a multiple of ALIGNMENT
    columns = lines.index_select(1, padded)[:, :num_rows]
    return SamplingColumns.of(columns, seeds.index_select(0, slots), num_tokens)
