"""What a step reads of the rows' tables, which have a line per slot: its specification in plain torch."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.sampling import SamplingColumns

# Columns begin at whole 16 bytes, in int32: Triton compiles a kernel again for a pointer that does not.
ALIGNMENT = 4


class RowTables(NamedTuple):
    """By slot, what is known of the row there.

    Attributes:
        token_ids: [num_slots, max_len] int32.
        block_tables: [num_slots, max_blocks] int32, each of `block_size` positions.
        block_size: of the cache.
    """

    token_ids: Tensor
    block_tables: Tensor
    block_size: int


class GatheredTokens(NamedTuple):
    """The new tokens of a step, in its order, and where their rows' keys and values lie.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64.
        slot_mapping: [T] int64, `block_id * block_size + offset` of each; -1 for padding.
        block_tables: [S, num_blocks] int32.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor


def gather_tokens(
    tables: RowTables, slots: Tensor, lengths: Tensor, row_slots: Tensor, num_blocks: int
) -> GatheredTokens:
    """Looks new tokens up.

    Args:
        slots: [T] int32, of each token's row.
        lengths: [T] int32, the tokens of that row up to this one and with it; 0 for padding, of which the row's first
            token is taken.
        row_slots: [S] int32.
        num_blocks: that are taken of each row's table, at most max_blocks.
    """
    indexes, positions = slots.long(), (lengths.long() - 1).clamp(min=0)
    blocks = tables.block_tables[indexes, positions // tables.block_size].long()
    slot_mapping = blocks * tables.block_size + positions % tables.block_size
    return GatheredTokens(
        token_ids=tables.token_ids[indexes, positions].long(),
        positions=positions,
        slot_mapping=slot_mapping.masked_fill(lengths == 0, -1),
        block_tables=tables.block_tables[:, :num_blocks].index_select(0, row_slots),
    )


def gather_columns(lines: Tensor, seeds: Tensor, slots: Tensor, num_tokens: Tensor) -> SamplingColumns:
    """Looks the sampling parameters of rows up, without their biases, stop tokens and masks.

    Args:
        lines: [len(FLOATS) + len(INTEGERS), num_slots] int32, floats bit by bit.
        seeds: [num_slots] int64.
        slots: [R] int32.
        num_tokens: [R] int32, which the columns have as they are.
    """
    num_rows = len(slots)
    padded = F.pad(slots, (0, -num_rows % ALIGNMENT))  # each column begins at a multiple of ALIGNMENT
    columns = lines.index_select(1, padded)[:, :num_rows]
    return SamplingColumns.of(columns, seeds.index_select(0, slots), num_tokens)
