"""Log probabilities of prompt tokens, for the chunks of a step whose rows request them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import Logprobs, PromptLogprobs
from pagewire.kernels.sampling import logprob_columns
from worker_service.rows.reading import ValueReader
from worker_service.rows.table import SequenceTable
from worker_service.rows.working_rows import WorkingRows

# Prompt positions whose logits exist at the same time. The limit bounds their memory, 128 x vocab_size float32.
MAX_LOGITS_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Consecutive prompt positions that one step computes for a request with prompt log probabilities.

    Position p yields the log probability of prompt token p + 1.
    """

    slot: int
    first: int  # index of the prompt token after the first position
    num: int  # positions
    num_top: int
    start: int  # index of the first position in the flat batch

    @property
    def tokens(self) -> tuple[int, slice]:
        """The index of this chunk's prompt tokens in a table's `token_ids`: (slot, range of positions).

        These are the tokens whose log probabilities the chunk yields.
        """
        return self.slot, slice(self.first, self.first + self.num)

    def compute(self, hidden: Tensor, tokens: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Compute the log probabilities of the prompt tokens that follow the chunk's positions.

        They are raw values: log_softmax of the model's logits. `hidden` [T, hidden_size] are the hidden states of the
        step. `tokens` [num] are the prompt tokens that follow the positions. Return the tensors that `read` converts:
        log probabilities, ranks, top token ids, and top log probabilities.
        """
        chunk = hidden[self.start : self.start + self.num]
        columns = [
            logprob_columns(compute_logits(positions), token_ids.long(), self.num_top)
            for positions, token_ids in zip(
                chunk.split(MAX_LOGITS_POSITIONS), tokens.split(MAX_LOGITS_POSITIONS), strict=True
            )
        ]
        return [torch.cat(parts) for parts in zip(*columns, strict=True)]

    def read(self, reading: ValueReader) -> PromptLogprobs:
        num, num_tops = self.num, self.num * self.num_top
        logprobs = Logprobs(
            chosen=tuple(reading.floats(num).tolist()),
            ranks=tuple(reading.integers(num).tolist()),
            top_token_ids=tuple(reading.integers(num_tops).tolist()),
            top_logprobs=tuple(reading.floats(num_tops).tolist()),
        )
        return PromptLogprobs(self.slot, self.first, logprobs)

    @property
    def num_values(self) -> int:
        """The number of int32 and float32 values that `read` reads for this chunk."""
        return 2 * self.num * (1 + self.num_top)


def prompt_chunks(
    table: SequenceTable, rows: WorkingRows, token_starts: NDArray[np.int64] | None = None
) -> list[PromptChunk]:
    """Return the prompt positions of each sequence of a step that must report prompt log probabilities, in slot order.

    Sequences that compute no prompt position in this step are left out. `token_starts` [S] is the offset of each
    sequence's tokens in the step's flat batch of tokens. If omitted, the tokens of the sequences follow one another in
    slot order.
    """
    if rows.are_plain:
        return []
    if token_starts is None:
        token_starts = np.cumsum(rows.num_new_tokens) - rows.num_new_tokens
    num_asked = table.sampling.num_prompt_logprobs[rows.slots]
    num_positions = np.minimum(rows.ends, table.num_prompt_tokens[rows.slots] - 1) - rows.starts
    return [
        PromptChunk(
            slot=int(rows.slots[row]),
            first=int(rows.starts[row]) + 1,
            num=int(num_positions[row]),
            num_top=min(int(num_asked[row]), table.limits.vocab_size),
            start=int(token_starts[row]),
        )
        for row in np.flatnonzero((num_asked >= 0) & (num_positions > 0))
    ]
