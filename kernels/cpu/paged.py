"""The rows of one step over a paged cache, in the form that the C kernels read, and a kernel that builds it from a
table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cache_rows import EIGHT_BITS, head_dim_of
from pagewire.kernels.cpu.abi import Structure, check, constants

MAX_HEAD_DIM: int = constants.MAX_HEAD_DIM
# The per-row inputs of a table batch, and their dtypes.
_INPUTS = {"slots": torch.int64, "starts": torch.int64, "num_new_tokens": torch.int64, "samples": torch.bool}


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of one step over a paged KV cache, as the attention kernels read them. A row is one running sequence.
    The new tokens of row i are the last of its seq_lens[i] positions.

    Build an object with `of` once per step; all layers share it. Each layer uses the block tables of its layer group.
    """

    query_start_loc: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    block_tables: Tensor  # [G, S, max_blocks] int32, of each layer group
    slot_mapping: Tensor  # [G, T] int64: block_id * block_size + offset of each token; -1: not stored

    @staticmethod
    def of(
        query_start_loc: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor, slot_mapping: Tensor
    ) -> "PagedRows":
        """Build the rows of a step from lists and tensors. `query_start_loc` must have one entry per row and one more,
        and `block_tables` one block table per layer group and row; otherwise ValueError is raised."""
        num_groups, num_rows, _ = block_tables.shape
        if len(query_start_loc) != len(seq_lens) + 1 or num_rows != len(seq_lens) or num_groups != len(slot_mapping):
            raise ValueError(
                f"{len(seq_lens)} rows need one block table each and one more start, and each layer group a slot "
                f"mapping, but there are {num_rows} tables, {len(query_start_loc)} starts, {num_groups} layer groups "
                f"and {len(slot_mapping)} slot mappings"
            )
        return PagedRows(
            torch.tensor(query_start_loc, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            block_tables.to(torch.int32).contiguous(),
            slot_mapping.to(torch.int64).contiguous(),
        )


def put_rows(step: Structure, rows: PagedRows, num_tokens: int, group: int = 0) -> None:
    """Fill in the members of the C structure `step` that describe the running sequences of a step: the addresses and
    sizes of the tensors in `rows`, from a layer group on. The structure does not keep the tensors alive."""
    slot_mapping, block_tables = rows.slot_mapping, rows.block_tables
    if group:  # indexing tensors takes about as long as the rest, and the first group is at their beginning
        slot_mapping, block_tables = slot_mapping[group], block_tables[group]
    step.at.num_rows, step.at.max_blocks = rows.block_tables.shape[1:]
    step.put(
        query_start_loc=rows.query_start_loc,
        seq_lens=rows.seq_lens,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        num_tokens=num_tokens,
        num_threads=torch.get_num_threads(),
    )


def paged_step(
    rows: PagedRows,
    scoring: Scoring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: int,
) -> Structure:
    """Check all arguments of an attention computation, and return them as a C structure to pass to the attention
    kernel. The structure contains the addresses of the tensors and does not keep the tensors alive.

    Raises ValueError if shapes, strides or dtypes do not fit.
    """
    num_tokens, num_heads, head_dim = query.shape
    is_any = query.dtype == torch.float32 or key_cache.dtype in EIGHT_BITS
    dtype = query.dtype if is_any else key_cache.dtype
    check("query", query, dtype, (num_tokens, num_heads, head_dim_of(key_cache)), is_strided=True)
    step = cache_step(scoring, num_heads, query.stride(0), key_cache, value_cache)
    put_rows(step, rows, num_tokens, group)
    shape = (rows.slot_mapping.shape[1], key_cache.shape[2], head_dim)
    check("key", key, query.dtype, shape, is_strided=True)
    check("value", value, query.dtype, shape, is_strided=True)
    step.put(fresh_key_token_stride=key.stride(0), fresh_value_token_stride=value.stride(0))
    return step


def cache_step(
    scoring: Scoring, num_heads: int, query_token_stride: int, key_cache: Tensor, value_cache: Tensor
) -> Structure:
    """Return a C structure for the attention kernel in which only the members for the KV cache and for `scoring` are
    filled in. The caller adds the members that differ from step to step. Raises ValueError if shapes, strides or dtypes
    do not fit."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    head_dim = head_dim_of(key_cache)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != key_cache.shape or cache.dtype != key_cache.dtype or cache.stride(3) != 1:
            raise ValueError(
                f"{name} is {cache.dtype} {tuple(cache.shape)} with strides {cache.stride()}; it must be "
                f"{key_cache.dtype} {tuple(key_cache.shape)}, with a contiguous last dimension"
            )
    if head_dim > MAX_HEAD_DIM or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} over {num_kv_heads} KV heads; the query heads must be a multiple "
            f"of the KV heads, and the head size at most {MAX_HEAD_DIM}"
        )
    if scoring.pattern is not None and scoring.pattern.block_size % constants.TILE_POSITIONS:
        unit = constants.TILE_POSITIONS
        raise ValueError(f"pattern has blocks of {scoring.pattern.block_size} positions; make it a multiple of {unit}")
    step = Structure(
        "attention_step",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        query_token_stride=query_token_stride,
        key_strides=key_cache.stride()[:3],
        value_strides=value_cache.stride()[:3],
        window=scoring.window,
        is_bidirectional=scoring.is_bidirectional,
        scale=scoring.scale,
        softcap=scoring.softcap,
        alibi_slopes=scoring.alibi_slopes,
        sinks=scoring.sinks,
        pattern=scoring.pattern or (),
    )
    for name in ("alibi_slopes", "sinks"):
        check(name, getattr(scoring, name), torch.float32, (num_heads,))
    return step


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The new tokens of all rows (running sequences) of a step, concatenated to flat tensors: T tokens of S rows. For R
    of the rows, a token is sampled after the step."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    paged: PagedRows
    sampling_indices: Tensor  # [R] int64: index of the last token of each sampling row


class TableFlattener:
    """Builds the input tensors of each step. It copies the new tokens and the block tables of the step's sequences from
    tables of all running sequences. A row is the worker's state of one running sequence, and its slot is its index in
    the tables.

    All calls write to the same memory, so each call overwrites the result of the previous call.
    """

    def __init__(
        self, library: Any, token_ids: NDArray[np.int32], block_tables: NDArray[np.int32], block_size: int
    ) -> None:
        """Allocate memory for the inputs of a step, which `flatten` will copy from these tables.

        Args:
            token_ids: [num_slots, any length], the tokens of each row; read at each call of `flatten`.
            block_tables: [G * num_slots, max_num_blocks], the KV cache blocks of each row, by layer group; read at each
                call of `flatten`.

        Raises:
            ValueError: an array is not contiguous, not int32, or their lengths do not fit.
        """
        num_slots = len(token_ids)
        for name, array in (("token_ids", token_ids), ("block_tables", block_tables)):
            if array.dtype != np.int32 or array.ndim != 2 or len(array) % num_slots or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}; it must be int32 [{num_slots}, any], contiguous"
                )
        self._num_groups = len(block_tables) // num_slots
        self._tables = token_ids, block_tables  # keeps alive the memory that the batch points to
        self._flatten = library.flatten_rows
        self._inputs = {name: torch.zeros(num_slots, dtype=dtype) for name, dtype in _INPUTS.items()}
        self._places = [place.numpy() for place in self._inputs.values()]
        self._rows = torch.empty(num_slots, dtype=torch.int64)  # sampling indices
        self._batch = Structure(
            "table_batch",
            token_ids=torch.from_numpy(token_ids),
            token_stride=token_ids.shape[1],
            block_tables=torch.from_numpy(block_tables),
            block_stride=block_tables.shape[1],
            num_slots=num_slots,
            num_groups=self._num_groups,
            block_size=block_size,
            sampling_indices=self._rows,
            **self._inputs,
        )
        self._sizes: tuple[int, int, int] | None = None
        self._flat: FlatRows | None = None

    def flatten(
        self,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_new_tokens: NDArray[np.int64],
        samples: NDArray[np.bool_],
        num_blocks: int,
    ) -> FlatRows:
        """Return the new tokens of the given rows as flat tensors, the inputs of the next step. Row i is in slot
        slots[i]. The step computes num_new_tokens[i] positions of it, starting at position starts[i].

        Args:
            slots, starts, num_new_tokens, samples: [S]; the values are not checked. `samples` is true for each row
                whose next token is sampled after the step.
            num_blocks: the number of KV cache blocks that the longest row needs; not checked.
        """
        num_rows = len(slots)
        sizes = int(num_new_tokens.sum()), num_rows, num_blocks
        flat = self._flat if sizes == self._sizes else None
        flat = flat or self._make_room(*sizes)
        for place, values in zip(self._places, (slots, starts, num_new_tokens, samples), strict=True):
            place[:num_rows] = values
        num_samples = self._flatten(self._batch.at)
        if num_samples != len(flat.sampling_indices):
            flat = FlatRows(flat.token_ids, flat.positions, flat.paged, self._rows[:num_samples])
            self._flat = flat
        return flat

    def _make_room(self, num_tokens: int, num_rows: int, num_blocks: int) -> FlatRows:
        token_ids, positions = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(2))
        paged = PagedRows(
            torch.empty(num_rows + 1, dtype=torch.int32),
            torch.empty(num_rows, dtype=torch.int32),
            torch.empty(self._num_groups, num_rows, num_blocks, dtype=torch.int32),
            torch.empty(self._num_groups, num_tokens, dtype=torch.int64),
        )
        self._batch.put(
            flat_token_ids=token_ids,
            positions=positions,
            slot_mapping=paged.slot_mapping,
            query_start_loc=paged.query_start_loc,
            seq_lens=paged.seq_lens,
            flat_tables=paged.block_tables,
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_blocks=num_blocks,
        )
        self._sizes = num_tokens, num_rows, num_blocks
        self._flat = FlatRows(token_ids, positions, paged, self._rows[:0])
        return self._flat
