"""The worker's running sequences, one row per slot, patched by plans and advanced by samples.

The table is the wall between the wire and memory: whatever a plan says, no row that it hands out reads or writes a
position that its blocks do not hold. A plan that breaks a rule raises ProtocolError; the session ends, and the next one
starts from an empty table.

Numbers stand in arrays by slot, so that a step costs a few vector operations and not a loop over rows. Tokens are one
int32 array [max_num_seqs, max_model_len + 1]; the system gives it memory only where rows were written.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_service.session import ProtocolError
from worker_service.step import RowOpening, SamplingParams, StepPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_device_blocks: int  # usable ones; ids are 1..num_device_blocks
    vocab_size: int

    @property
    def max_num_blocks(self) -> int:
        """Blocks that one row's table may hold."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class WorkingRows:
    """The rows of one step in slot order: row i computes positions [starts[i], starts[i] + num_new_tokens[i])."""

    slots: IntArray  # [S]
    starts: IntArray  # [S]
    num_new_tokens: IntArray  # [S], each at least 1
    samples: NDArray[np.bool_]  # [S], the row reaches its end

    @property
    def ends(self) -> IntArray:
        return self.starts + self.num_new_tokens


class SequenceTable:
    """Rows by slot. Every column has one entry per slot; those of a vacant slot mean nothing but `work`, which is 0."""

    def __init__(self, limits: TableLimits) -> None:
        self.limits = limits
        size = limits.max_num_seqs
        self.token_ids = np.zeros((size, limits.max_model_len + 1), np.int32)
        self.block_tables = np.zeros((size, limits.max_num_blocks), np.int32)  # 0 beyond a row's num_blocks
        self.occupied = np.zeros(size, np.bool_)
        self.num_tokens = np.zeros(size, np.int64)
        self.num_prompt_tokens = np.zeros(size, np.int64)
        self.num_computed_tokens = np.zeros(size, np.int64)
        self.num_blocks = np.zeros(size, np.int64)
        self.work = np.zeros(size, np.int64)  # tokens to compute each step; 0 is paused
        self.seeds = np.zeros(size, np.uint64)
        self.sample_indexes = np.zeros(size, np.int64)
        self.sampling: list[SamplingParams] = [SamplingParams()] * size
        self.is_special = np.zeros(size, np.bool_)  # samples by more than the highest of the model's own logits
        self.num_prompt_logprobs = np.full(size, -1, np.int64)  # -1: none asked for

    def clear(self) -> None:
        self.occupied[:] = False
        self.work[:] = 0
        self.block_tables[:] = 0
        self.num_blocks[:] = 0

    def apply(self, plan: StepPlan) -> WorkingRows:
        """Patch the table and return the step's work. Raises ProtocolError."""
        for slot in plan.released_slots:
            self._release(slot)
        for opening in plan.openings:
            self._open(opening)
        self._append_blocks(plan)
        self._patch_work(plan)
        return self._working_rows()

    def advance(self, rows: WorkingRows, sampled_token_ids: IntArray) -> None:
        """The step is done: its positions are computed, and each sampling row gets its token, in slot order."""
        self.num_computed_tokens[rows.slots] = rows.ends
        slots = rows.slots[rows.samples]
        self.token_ids[slots, self.num_tokens[slots]] = sampled_token_ids
        self.num_tokens[slots] += 1
        self.work[slots] = 1

    def _check_slot(self, slot: int, *, occupied: bool) -> None:
        if not 0 <= slot < self.limits.max_num_seqs:
            raise ProtocolError(f"slot {slot} is out of range: there are {self.limits.max_num_seqs}")
        if self.occupied[slot] != occupied:
            raise ProtocolError(f"slot {slot} is {'vacant' if occupied else 'occupied'}")

    def _check_block_ids(self, slot: int, block_ids: IntArray) -> None:
        if len(block_ids) and not (block_ids.min() >= 1 and block_ids.max() <= self.limits.num_device_blocks):
            raise ProtocolError(
                f"slot {slot} gets blocks {block_ids.min()} to {block_ids.max()}; ids are 1 to "
                f"{self.limits.num_device_blocks}"
            )

    def _release(self, slot: int) -> None:
        self._check_slot(slot, occupied=True)
        self.occupied[slot] = False
        self.work[slot] = 0
        self.block_tables[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0

    def _open(self, opening: RowOpening) -> None:
        slot = opening.slot
        self._check_slot(slot, occupied=False)
        token_ids = _as_array(opening.token_ids)
        block_ids = _as_array(opening.block_ids)
        _check_opening(opening, token_ids, self.limits)
        self._check_block_ids(slot, block_ids)
        _check_sampling(slot, opening.sampling, self.limits.vocab_size)
        self.occupied[slot] = True
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.block_tables[slot, : len(block_ids)] = block_ids
        self.num_tokens[slot] = len(token_ids)
        self.num_prompt_tokens[slot] = opening.num_prompt_tokens
        self.num_computed_tokens[slot] = opening.num_computed_tokens
        self.num_blocks[slot] = len(block_ids)
        self.seeds[slot] = opening.seed
        self.sample_indexes[slot] = opening.sample_index
        self.sampling[slot] = opening.sampling
        self.is_special[slot] = _is_special(opening.sampling)
        num_prompt_logprobs = opening.sampling.num_prompt_logprobs
        self.num_prompt_logprobs[slot] = -1 if num_prompt_logprobs is None else num_prompt_logprobs

    def _append_blocks(self, plan: StepPlan) -> None:
        if len(plan.append_slots) != len(plan.append_block_ids):
            raise ProtocolError(f"{len(plan.append_slots)} slots get {len(plan.append_block_ids)} blocks appended")
        for slot, block_id in zip(plan.append_slots, plan.append_block_ids, strict=True):
            self._check_slot(slot, occupied=True)
            if not 1 <= block_id <= self.limits.num_device_blocks:
                raise ProtocolError(f"slot {slot} gets block {block_id}; ids are 1 to {self.limits.num_device_blocks}")
            num_blocks = self.num_blocks[slot]
            if num_blocks >= self.limits.max_num_blocks:
                raise ProtocolError(f"slot {slot} has {num_blocks} blocks already, enough for max_model_len")
            self.block_tables[slot, num_blocks] = block_id
            self.num_blocks[slot] = num_blocks + 1

    def _patch_work(self, plan: StepPlan) -> None:
        if len(plan.work_slots) != len(plan.work_num_tokens):
            raise ProtocolError(f"{len(plan.work_slots)} slots are patched with {len(plan.work_num_tokens)} counts")
        if len(set(plan.work_slots)) != len(plan.work_slots):
            raise ProtocolError("a slot is patched twice in one plan")
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            self._check_slot(slot, occupied=True)
            if not 0 <= num_tokens <= self.limits.max_num_batched_tokens:
                raise ProtocolError(
                    f"slot {slot} is to compute {num_tokens} tokens; a step computes at most "
                    f"{self.limits.max_num_batched_tokens}"
                )
            self.work[slot] = num_tokens

    def _working_rows(self) -> WorkingRows:
        limits = self.limits
        slots = np.flatnonzero(self.work)
        starts = self.num_computed_tokens[slots]
        num_new_tokens = self.work[slots]
        ends = starts + num_new_tokens
        num_tokens = self.num_tokens[slots]
        num_step_tokens = int(num_new_tokens.sum())
        if num_step_tokens > limits.max_num_batched_tokens:
            raise ProtocolError(
                f"a step is to compute {num_step_tokens} tokens; it computes at most {limits.max_num_batched_tokens}"
            )
        _check_ends(slots, ends, num_tokens, "tokens")
        _check_ends(slots, ends, self.num_blocks[slots] * limits.block_size, "positions in its blocks")
        _check_ends(slots, ends, np.full_like(ends, limits.max_model_len), "positions by max_model_len")
        return WorkingRows(slots, starts, num_new_tokens, ends == num_tokens)


def _as_array(values: tuple[int, ...]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _check_ends(slots: IntArray, ends: IntArray, limits: IntArray, what: str) -> None:
    beyond = np.flatnonzero(ends > limits)
    if len(beyond):
        row = beyond[0]
        raise ProtocolError(f"slot {slots[row]} is to compute up to position {ends[row]}; it has {limits[row]} {what}")


def _check_opening(opening: RowOpening, token_ids: IntArray, limits: TableLimits) -> None:
    slot, num_tokens = opening.slot, len(token_ids)
    if not 1 <= num_tokens <= limits.max_model_len:
        raise ProtocolError(f"slot {slot} opens with {num_tokens} tokens; a row has 1 to {limits.max_model_len}")
    if not (token_ids.min() >= 0 and token_ids.max() < limits.vocab_size):
        raise ProtocolError(
            f"slot {slot} opens with tokens {token_ids.min()} to {token_ids.max()}; ids are below {limits.vocab_size}"
        )
    if not 1 <= opening.num_prompt_tokens <= num_tokens:
        raise ProtocolError(f"slot {slot} opens with {num_tokens} tokens, {opening.num_prompt_tokens} of them prompt")
    if not 0 <= opening.num_computed_tokens < num_tokens:
        raise ProtocolError(
            f"slot {slot} opens with {opening.num_computed_tokens} of {num_tokens} tokens computed; one must be left"
        )
    if len(opening.block_ids) > limits.max_num_blocks:
        raise ProtocolError(
            f"slot {slot} opens with {len(opening.block_ids)} blocks; max_model_len takes {limits.max_num_blocks}"
        )
    if opening.num_computed_tokens > len(opening.block_ids) * limits.block_size:
        raise ProtocolError(
            f"slot {slot} opens with {opening.num_computed_tokens} computed tokens in {len(opening.block_ids)} blocks "
            f"of {limits.block_size}"
        )
    if not 0 <= opening.seed < 1 << 64 or not 0 <= opening.sample_index < 1 << 32:
        raise ProtocolError(f"slot {slot} opens with seed {opening.seed}, sample_index {opening.sample_index}")


def _check_sampling(slot: int, sampling: SamplingParams, vocab_size: int) -> None:
    ranges = (
        ("temperature", 0.0 <= sampling.temperature < math.inf),
        ("top_k", sampling.top_k >= 0),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf),
        ("presence_penalty", math.isfinite(sampling.presence_penalty)),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty)),
        ("logit_bias_token_ids", all(0 <= token_id < vocab_size for token_id in sampling.logit_bias_token_ids)),
        ("logit_bias_values", not any(math.isnan(value) for value in sampling.logit_bias_values)),
        ("min_tokens", sampling.min_tokens >= 0),
        ("num_logprobs", sampling.num_logprobs is None or sampling.num_logprobs >= 0),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs is None or sampling.num_prompt_logprobs >= 0),
    )
    for name, is_valid in ranges:
        if not is_valid:
            raise ProtocolError(f"slot {slot} opens with {name} {getattr(sampling, name)}, which is out of range")
    if len(sampling.logit_bias_token_ids) != len(sampling.logit_bias_values):
        raise ProtocolError(
            f"slot {slot} opens with {len(sampling.logit_bias_values)} biases for "
            f"{len(sampling.logit_bias_token_ids)} tokens"
        )


def _is_special(sampling: SamplingParams) -> bool:
    return (
        sampling.temperature > 0.0
        or bool(sampling.logit_bias_token_ids)
        or bool(sampling.min_tokens and sampling.stop_token_ids)
        or (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
        or sampling.num_logprobs is not None
    )
