"""Kernels that gather a step's inputs from the tables of rows, one launch each. Specification:
`pagewire.kernels.gathering`.

Grids depend only on the shapes of the tensors, so a CUDA graph can contain the launches.
"""

from collections import namedtuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.gathering import ALIGNMENT, GatheredTokens, RowTables
from pagewire.kernels.sampling import SamplingColumns
from pagewire.kernels.triton.launching import Strided, check_tensor

# The work of one program.
_TILE_TOKENS = 256
_TILE_BLOCKS = 1024  # entries of a block table
_TILE_ROWS = 32
_ALIGNMENT = tl.constexpr(ALIGNMENT)

# `RowTables`, each `Strided`.
_Tables = namedtuple("_Tables", "token_ids block_tables")


def gather_tokens(
    tables: RowTables, slots: Tensor, lengths: Tensor, row_slots: Tensor, num_blocks: int
) -> GatheredTokens:
    """Collect the new tokens of a step, their positions, KV cache slots and block tables, from tables on the GPU.
    `pagewire.kernels.gathering.gather_tokens` specifies the result.

    Args:
        tables, slots, lengths, row_slots, num_blocks: as specified; tensors of int32, the last dimension dense.

    Raises:
        ValueError: a shape, dtype, stride or number is not supported.
    """
    num_tokens, num_rows = len(slots), len(row_slots)
    check_tensor("slots", slots, ("T",), torch.int32)
    check_tensor("lengths", lengths, (num_tokens,), torch.int32)
    check_tensor("row_slots", row_slots, ("S",), torch.int32)
    check_tensor("token_ids", tables.token_ids, ("num_slots", "max_len"), torch.int32, is_strided=True)
    sizes = ("layer_groups", "num_slots", "max_blocks")
    check_tensor("block_tables", tables.block_tables, sizes, torch.int32, is_strided=True)
    num_layer_groups, _, max_blocks = tables.block_tables.shape
    if not 0 <= num_blocks <= max_blocks:
        raise ValueError(f"num_blocks is {num_blocks}; make it 0 to {max_blocks}, the size of a block table")
    token_ids, positions = (slots.new_empty(num_tokens, dtype=torch.int64) for _ in range(2))
    # Each layer group's slots are aligned, since Triton compiles a kernel again for another alignment.
    padded = slots.new_empty(num_layer_groups, num_tokens + -num_tokens % ALIGNMENT, dtype=torch.int64)
    block_tables = slots.new_empty(num_layer_groups, num_rows, num_blocks)
    gathered = GatheredTokens(token_ids, positions, padded[:, :num_tokens], block_tables)
    num_tiles, num_pieces = triton.cdiv(num_tokens, _TILE_TOKENS), triton.cdiv(num_blocks, _TILE_BLOCKS)
    num_programs = num_tiles + num_layer_groups * num_rows * num_pieces
    if num_programs:
        _gather_tokens_kernel[(num_programs,)](
            _Tables(Strided.of(tables.token_ids), Strided.of(tables.block_tables)),
            slots,
            lengths,
            row_slots,
            gathered,
            num_tokens,
            num_rows,
            num_blocks,
            NUM_LAYER_GROUPS=num_layer_groups,
            BLOCK_SIZE=tables.block_size,
            TILE_TOKENS=_TILE_TOKENS,
            TILE_BLOCKS=_TILE_BLOCKS,
            num_warps=4,
        )
    return gathered


def gather_columns(lines: Tensor, seeds: Tensor, slots: Tensor, num_tokens: Tensor) -> SamplingColumns:
    """Collect the sampling parameters of the rows (running sequences) of a step from tables on the GPU.
    `pagewire.kernels.gathering.gather_columns` specifies the result.

    Args:
        lines, seeds, slots, num_tokens: as specified, the last dimension dense.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    check_tensor("slots", slots, ("R",), torch.int32)
    check_tensor("num_tokens", num_tokens, (len(slots),), torch.int32)
    check_tensor("lines", lines, ("columns", "num_slots"), torch.int32, is_strided=True)
    check_tensor("seeds", seeds, tuple(lines.shape[1:]), torch.int64)
    num_lines, num_rows = len(lines), len(slots)
    columns = lines.new_empty(num_lines, num_rows + -num_rows % ALIGNMENT)
    row_seeds = seeds.new_empty(num_rows)
    if num_rows:
        _gather_columns_kernel[(triton.cdiv(num_rows, _TILE_ROWS),)](
            Strided.of(lines),
            seeds,
            slots,
            columns,
            row_seeds,
            columns.stride(0),
            num_rows,
            NUM_LINES=num_lines,
            PADDED_LINES=triton.next_power_of_2(num_lines),
            TILE=_TILE_ROWS,
            num_warps=4,
        )
    return SamplingColumns.of(columns[:, :num_rows], row_seeds, num_tokens)


# The number of tokens and rows of a step, and the alignment of its uploaded tensors, must not trigger a recompilation.
@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_blocks"],
    do_not_specialize_on_alignment=["slots", "lengths", "row_slots"],
)
def _gather_tokens_kernel(
    tables, slots, lengths, row_slots, gathered, num_tokens, num_rows, num_blocks,
    NUM_LAYER_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Triton kernel that collects the inputs of a step from the tables of all rows (running sequences). The first
    programs copy a tile of tokens each. Every other program copies one piece of one row's block table in one layer
    group."""
    program = tl.program_id(0)
    mapping_stride = tl.cdiv(num_tokens, _ALIGNMENT) * _ALIGNMENT
    num_tiles, num_pieces = tl.cdiv(num_tokens, TILE_TOKENS), tl.cdiv(num_blocks, TILE_BLOCKS)
    if program < num_tiles:
        token = program * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        is_token = token < num_tokens
        slot = tl.load(slots + token, is_token, 0).to(tl.int64)
        length = tl.load(lengths + token, is_token, 0)
        position = tl.maximum(length - 1, 0)
        token_id = tl.load(tables.token_ids.data + slot * tables.token_ids.strides[0] + position, is_token, 0)
        tl.store(gathered.token_ids + token, token_id.to(tl.int64), is_token)
        tl.store(gathered.positions + token, position.to(tl.int64), is_token)
        place = tables.block_tables.data + slot * tables.block_tables.strides[1] + position // BLOCK_SIZE
        for layer_group in tl.static_range(NUM_LAYER_GROUPS):
            block = tl.load(place + layer_group * tables.block_tables.strides[0], is_token, 0).to(tl.int64)
            mapping = tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(gathered.slot_mapping + layer_group * mapping_stride + token, mapping, is_token)
    else:
        copied = ((program - num_tiles) // num_pieces).to(tl.int64)  # the number of the table in the result
        index = (program - num_tiles) % num_pieces * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        table_slot = tl.load(row_slots + copied % num_rows).to(tl.int64)
        table = copied // num_rows * tables.block_tables.strides[0] + table_slot * tables.block_tables.strides[1]
        blocks = tl.load(tables.block_tables.data + table + index, index < num_blocks, 0)
        tl.store(gathered.block_tables + copied * num_blocks + index, blocks, index < num_blocks)


@triton.jit(do_not_specialize=["column_stride", "num_rows"], do_not_specialize_on_alignment=["slots"])
def _gather_columns_kernel(
    lines, seeds, slots, columns, row_seeds, column_stride, num_rows,
    NUM_LINES: tl.constexpr, PADDED_LINES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Triton kernel that collects the sampling parameters of TILE rows (running sequences) per program."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = row < num_rows
    slot = tl.load(slots + row, is_row, 0)
    tl.store(row_seeds + row, tl.load(seeds + slot, is_row, 0), is_row)
    line = tl.arange(0, PADDED_LINES)[:, None]
    mask = (line < NUM_LINES) & is_row[None, :]
    values = tl.load(lines.data + line * lines.strides[0] + slot[None, :], mask, 0)
    tl.store(columns + line * column_stride + row[None, :], values, mask)
