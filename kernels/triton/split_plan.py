"""The places where the rows of a step are cut, so that programs of `decode_attention` share the work evenly."""

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.launching import check_tensor

MIN_CHUNK = 64  # positions, which are one tile of most shapes: there is nothing to share in less
# Splits are shorter than so many times the shortest only where processors would have nothing to do: each costs memory
# traffic for what it adds up to.
CHUNKS_OF_FULL = 4
MAX_UNSPLIT_LEN = 256  # positions; about what one program reads in the time of a second launch, by estimate
PROGRAMS_PER_PROCESSOR = 4
ANY_LEN = 2**31 - 1
_ALIGNMENT = 64  # positions
_TILE = 128


def prefers_splits(num_rows: int, num_kv_heads: int, num_positions: int, max_seq_len: int, num_processors: int) -> bool:
    """Whether `paged_attention_v2` is faster than `paged_attention_v1`.

    It is where the program of the longest row alone takes longer than all rows spread evenly over two programs per
    processor, unless even that row is short. For what a graph is captured for, pass the bounds of its steps.

    Args:
        num_positions: of all rows together.
        max_seq_len: of the longest row, in positions.
        num_processors: of the device (`multi_processor_count`).
    """
    if num_rows == 0 or max_seq_len <= MAX_UNSPLIT_LEN:
        return False
    return max_seq_len * 2 * num_processors > num_positions * num_kv_heads


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The splits of a step's rows, the same in all layers, and scratch memory for what they add up to.

    All splits are about as long as all rows together divided by the number of programs wanted, whatever the mixture of
    lengths; where that is little, divided by the number of processors. So a fixed number of programs is enough for
    every step, and few of them have nothing to do. A row in one piece needs neither scratch memory nor the second
    launch.

    Attributes:
        split_starts: [S + 1] int32; row i has splits split_starts[i] to split_starts[i + 1], and a row of seq_len 0
            none.
        split_rows: [max_splits] int32, the row of each split; -1 past the last.
        sums: [max_splits, num_heads, head_dim] float32, values times their weights.
        highest: [max_splits, num_heads] float32, the highest score, in units of log 2.
        totals: [max_splits, num_heads] float32, the sum of the weights, relative to the highest score.
        num_shares: how many splits all rows together would make, if none ended early.
        min_chunk: positions of the shortest split that does not end its row. Below four times that, there are about as
            many programs as processors.
    """

    split_starts: Tensor
    split_rows: Tensor
    sums: Tensor
    highest: Tensor
    totals: Tensor
    num_shares: int
    min_chunk: int

    @staticmethod
    def allocate(
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int = 0,
        min_chunk: int = MIN_CHUNK,
    ) -> "SplitPlan":
        """Memory for steps of `num_rows` rows.

        Args:
            num_programs: that share the work, four for each processor; 0: of the device's.
            min_chunk: in positions, a multiple of 16.

        Raises:
            ValueError: a number out of range, or num_programs left to a device that is not a GPU.
        """
        if not num_programs and device.type == "cuda":
            num_programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        if num_programs < 1:
            raise ValueError(f"num_programs is {num_programs} on the device {device}; make it at least 1")
        if min_chunk < 16 or min_chunk % 16:
            raise ValueError(f"min_chunk is {min_chunk}; make it a multiple of 16, at least 16")
        num_shares = max(1, num_programs // num_kv_heads)
        max_splits = num_rows + num_shares  # the last split of each row may be a short one
        return SplitPlan(
            torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            torch.full((max_splits,), -1, dtype=torch.int32, device=device),
            torch.empty((max_splits, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((max_splits, num_heads), dtype=torch.float32, device=device),
            torch.empty((max_splits, num_heads), dtype=torch.float32, device=device),
            num_shares,
            min_chunk,
        )

    @property
    def num_rows(self) -> int:
        return self.split_starts.shape[0] - 1

    def of_first(self, num_rows: int) -> "SplitPlan":
        """A plan for no more than `num_rows` rows, in the same memory. Raises ValueError if it is for fewer."""
        if not 0 <= num_rows <= self.num_rows:
            raise ValueError(f"num_rows is {num_rows}, and the memory is for 0 to {self.num_rows}: allocate more")
        past_split = self.split_rows.shape[0] - self.num_rows + num_rows
        return SplitPlan(
            self.split_starts[: num_rows + 1],
            self.split_rows[:past_split],
            self.sums[:past_split],
            self.highest[:past_split],
            self.totals[:past_split],
            self.num_shares,
            self.min_chunk,
        )

    def decide(self, seq_lens: Tensor, max_positions: int = ANY_LEN) -> None:
        """Cuts rows of these lengths, on the device and without waiting for it.

        Args:
            seq_lens: [S] int32.
            max_positions: the most that a row reads: the window, or max_selected * block_size.

        Raises:
            ValueError: the plan is for another number of rows, or rows read nothing.
        """
        check_tensor("seq_lens", seq_lens, (self.num_rows,), torch.int32)
        if max_positions < 1:
            raise ValueError(f"max_positions is {max_positions}; make it at least 1")
        max_splits = self.split_rows.shape[0]
        _plan_kernel[(triton.cdiv(max_splits, _TILE),)](
            *(seq_lens, self.split_starts, self.split_rows),
            *(self.num_rows, max_splits, self.num_shares, max_positions),
            MIN_CHUNK=self.min_chunk,
            FULL_CHUNK=CHUNKS_OF_FULL * self.min_chunk,
            SHARES_PER_PROCESSOR=PROGRAMS_PER_PROCESSOR,
            ALIGNMENT=min(_ALIGNMENT, self.min_chunk),
            TILE=_TILE,
            num_warps=4,
        )

    def check(self, query_shape: tuple[int, int, int]) -> None:
        """Raises ValueError unless the plan is for queries of this shape, [S, num_heads, head_dim]."""
        expected = [self.num_rows, *self.sums.shape[1:]]
        if list(query_shape) != expected:
            raise ValueError(f"queries are {list(query_shape)} and the plan is for {expected}; allocate one for them")


@triton.jit(
    do_not_specialize=["num_rows", "max_splits", "num_shares", "max_positions"],
    do_not_specialize_on_alignment=["seq_lens"],
)
def _plan_kernel(
    seq_lens, split_starts, split_rows, num_rows, max_splits, num_shares, max_positions,
    MIN_CHUNK: tl.constexpr, FULL_CHUNK: tl.constexpr, SHARES_PER_PROCESSOR: tl.constexpr, ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A program fills TILE entries of split_rows; the first one also writes split_starts, but for the 0 in front."""
    columns = tl.arange(0, TILE)
    num_positions = tl.full([], 0, tl.int64)
    for start in tl.range(0, num_rows, TILE):
        lens = tl.load(seq_lens + start + columns, mask=start + columns < num_rows, other=0)
        num_positions += tl.sum(tl.minimum(lens, max_positions).to(tl.int64), axis=0)
    chunk = tl.maximum(tl.cdiv(num_positions, num_shares), MIN_CHUNK)
    chunk = tl.cdiv(chunk, ALIGNMENT) * ALIGNMENT
    # Rounded down: rather a few programs more than processors than half as many.
    of_processor = tl.cdiv(num_positions, tl.maximum(num_shares // SHARES_PER_PROCESSOR, 1)) // ALIGNMENT * ALIGNMENT
    chunk = tl.maximum(chunk, tl.minimum(of_processor, FULL_CHUNK)).to(tl.int32)

    splits = tl.program_id(0) * TILE + columns
    num_before = tl.zeros([TILE], tl.int32)  # rows that end before a split
    num_splits = tl.full([], 0, tl.int32)
    for start in tl.range(0, num_rows, TILE):
        rows = start + columns
        lens = tl.load(seq_lens + rows, mask=rows < num_rows, other=0)
        counts = tl.cdiv(tl.minimum(lens, max_positions), chunk)
        ends = num_splits + tl.cumsum(counts, axis=0)
        is_before = (ends[None, :] <= splits[:, None]) & (rows < num_rows)[None, :]
        num_before += tl.sum(is_before.to(tl.int32), axis=1)
        if tl.program_id(0) == 0:
            tl.store(split_starts + 1 + rows, ends, mask=rows < num_rows)
        num_splits += tl.sum(counts, axis=0)
    tl.store(split_rows + splits, tl.where(splits < num_splits, num_before, -1), mask=splits < max_splits)
