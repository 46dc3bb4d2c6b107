"""Warm-up steps that use every kernel of a configuration, so that no kernel is compiled while requests wait.

Triton compiles a kernel for each kind of launch arguments: with or without penalties, biases or masks, and with the
tile that suits the number of tokens. These steps cover all kinds.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pagewire.common.wire.messages import AddedGrammar, GrammarKind, RowOpening, SamplingParams, StepPlan
from worker_service.epoch_grammars import EpochGrammars
from worker_service.rows import MAX_LOGITS_POSITIONS, TableLimits
from worker_service.runner import ModelRunner

logger = logging.getLogger(__name__)

_GRAMMAR_TIMEOUT_S = 60.0
_GRAMMAR = AddedGrammar(1, GrammarKind.REGEX, "[a-z]*", end_token_ids=(0,))

FILTERED = SamplingParams(temperature=1.0, top_p=0.9)
_BIASES = {"logit_bias_token_ids": (0,), "logit_bias_values": (1.0,)}
_STOPS = {"min_tokens": 2, "stop_token_ids": (0,)}
_SAMPLING = {
    "sampling": FILTERED,
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.1),
    "log-probabilities": SamplingParams(num_logprobs=1, num_prompt_logprobs=1),
    "listed log-probabilities": SamplingParams(num_logprobs=1, logprob_token_ids=(0,)),
    "candidates": SamplingParams(num_candidates=2),
    "biases": SamplingParams(**_BIASES),  # type: ignore[arg-type]
    "stop tokens": SamplingParams(**_STOPS),  # type: ignore[arg-type]
    "biases and stop tokens": SamplingParams(**_BIASES, **_STOPS),  # type: ignore[arg-type]
}
# Functions that torch computes with MKL. Each one selects its own variant when it is first called.
_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.cosh, torch.sinh, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.expm1, torch.log, torch.log10, torch.log1p, torch.log2),
    *(torch.sqrt, torch.rsqrt, torch.sigmoid, torch.nn.functional.silu, torch.trunc),
)


@dataclass(frozen=True, slots=True)
class TrialRow:
    """An invented sequence of a warm-up step, which belongs to no request.

    The step computes the last `num_new` of its `num_tokens` tokens.
    """

    num_tokens: int
    num_new: int
    sampling: SamplingParams = FILTERED
    grammar_id: int = 0

    def num_blocks(self, block_size: int) -> int:
        """Return the number of KV cache blocks that the sequence's tokens need."""
        return -(-self.num_tokens // block_size)

    @property
    def num_states(self) -> int:
        """The number of states that the sequence writes, if the model has states."""
        return 2 if self.grammar_id or self.sampling.num_candidates is not None else 1


def plan_trial(rows: Sequence[TrialRow], block_size: int, num_groups: int = 1, has_states: bool = False) -> StepPlan:
    """Return a step plan that starts the given sequences in an empty worker and computes their new tokens.

    The sequences use the KV cache blocks from 1 on. Each has its own blocks, as many in each of `num_groups` layer
    groups. If the model has states, all sequences write the same states, because nothing reads what they compute.
    """
    openings, next_block = [], 1
    for slot, row in enumerate(rows):
        num_blocks = row.num_blocks(block_size)
        past_block = next_block + num_groups * num_blocks
        openings.append(
            RowOpening(
                slot=slot,
                sequence_id=slot,
                token_ids=(0,) * row.num_tokens,
                num_prompt_tokens=row.num_tokens,
                num_computed_tokens=row.num_tokens - row.num_new,
                block_ids=tuple(range(next_block, past_block)),
                sampling=row.sampling,
                seed=0,
                sample_index=0,
                grammar_id=row.grammar_id,
                table_lengths=(num_blocks,) * num_groups,
                read_state=int(has_states and row.num_new < row.num_tokens),
                own_states=tuple(range(1, row.num_states + 1)) if has_states else (),
            )
        )
        next_block = past_block
    return StepPlan(
        epoch=0,
        step=1,
        openings=tuple(openings),
        work_slots=tuple(range(len(rows))),
        work_num_tokens=tuple(row.num_new for row in rows),
    )


def warm_up(runner: ModelRunner, grammars: EpochGrammars, tell: Callable[[str], object]) -> None:
    """Run warm-up steps, so that all kernels are compiled before the first request.

    Call this before the first epoch. Afterwards the KV cache's content is lost and the worker has no running sequences.
    `grammars` are the runner's grammars. If the worker supports grammars, some steps sample under a grammar mask.
    `tell` receives the progress.
    """
    has_grammar = _add_grammar(grammars)
    limits = runner.table.limits
    steps = [(name, rows) for name, rows in _steps(limits, has_grammar) if _fits(rows, limits)]
    started_at = time.monotonic()
    for index, (name, rows) in enumerate(steps):
        tell(f"compiling kernels: {index} of {len(steps)} ({name})")
        runner.execute(plan_trial(rows, limits.block_size, len(limits.windows), limits.num_device_states > 0))
        runner.table.clear()
    logger.info("compiled the kernels of %d kinds of steps in %.1f s", len(steps), time.monotonic() - started_at)
    if has_grammar:
        grammars.release(_GRAMMAR.grammar_id)


def _add_grammar(grammars: EpochGrammars) -> bool:
    """Compile a small grammar for the warm-up steps. Return whether it is ready.

    The result is False if the worker does not support grammars, or if the compilation fails or takes too long.
    """
    if not grammars.reads_any:
        return False
    is_ready, errors = threading.Event(), []

    def report(found: object) -> None:
        errors.append(getattr(found, "error", ""))
        is_ready.set()

    grammars.begin(0, report)
    grammars.add(_GRAMMAR)
    return is_ready.wait(_GRAMMAR_TIMEOUT_S) and not any(errors)


def _steps(limits: TableLimits, has_grammar: bool) -> Iterator[tuple[str, tuple[TrialRow, ...]]]:
    """Yield (name, sequences) for each warm-up step. The name is for the log."""
    for num_tokens in _trial_sizes(limits.max_num_batched_tokens):
        yield f"prompts of {num_tokens} tokens", _split(num_tokens, limits)
    # The output head multiplies one token of each row, or all tokens of a prompt in parts.
    for num_rows in _trial_sizes(limits.max_num_seqs)[1:]:
        yield f"{num_rows} prompts of a token", (TrialRow(1, 1),) * num_rows
    for num_tokens in _trial_sizes(min(limits.max_num_batched_tokens, 2 * MAX_LOGITS_POSITIONS)):
        row = TrialRow(num_tokens, num_tokens, _SAMPLING["log-probabilities"])
        yield f"log-probabilities of {num_tokens} tokens", (row,)
    prompt = TrialRow(3, 3)
    yield "a prompt beside decoding", (TrialRow(2, 1), prompt)
    yield "a prompt beside decoding with a long context", (TrialRow(_max_num_tokens(limits), 1), prompt)
    for grammar_id in range(1 + has_grammar):
        for name, sampling in _SAMPLING.items():
            yield name, (TrialRow(3, 3, sampling, grammar_id),)


def _trial_sizes(highest: int) -> list[int]:
    """Return the powers of two below `highest`, followed by `highest`: the sizes of warm-up steps."""
    return [*(1 << power for power in range((highest - 1).bit_length())), highest]


def _split(num_tokens: int, limits: TableLimits) -> tuple[TrialRow, ...]:
    """Divide `num_tokens` tokens among the fewest sequences that the maximum length and the KV cache permit."""
    num_rows = -(-num_tokens // _max_num_tokens(limits))
    sizes = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    return tuple(TrialRow(size, size) for size in sizes)


def _max_num_tokens(limits: TableLimits) -> int:
    """Return the most tokens that a warm-up sequence can have if a KV cache block of each layer group must remain for
    another sequence.

    The result is at least 1 and at most the maximum length of a sequence.
    """
    num_blocks = limits.num_device_blocks // len(limits.windows)  # of a layer group
    return max(1, min(limits.max_model_len, (num_blocks - 1) * limits.block_size))


def _fits(rows: tuple[TrialRow, ...], limits: TableLimits) -> bool:
    """Return whether a warm-up step with these sequences stays within the worker's limits.

    The limits are the number of sequences, KV cache blocks, new tokens, and the length of a sequence. Prompts of a
    bidirectional model are computed whole.
    """
    num_blocks = len(limits.windows) * sum(row.num_blocks(limits.block_size) for row in rows)
    return (
        len(rows) <= limits.max_num_seqs
        and num_blocks <= limits.num_device_blocks
        and sum(row.num_new for row in rows) <= limits.max_num_batched_tokens
        and all(row.num_tokens <= limits.max_model_len for row in rows)
        and all(row.num_tokens == row.num_new for row in rows if limits.is_bidirectional)
    )


def initialize_vector_math() -> None:
    """Call torch's vector math functions once on one thread, before several threads call them at the same time.

    MKL detects the processor at the first call of any of its functions, without a lock. If two threads make that call
    at the same time, one of them may use functions of low accuracy for its part of the work. This function therefore
    calls each vector function with one element, which uses one thread, and computes one matrix multiplication.
    Processes that are forked later inherit the result.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1, 1), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(one)
        one.softmax(-1)
        one @ one
