"""Log-probabilities of prompt tokens on a device, for the chunks of a step that were asked for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_service.device.sampling import Reading
from worker_service.rows.table import SequenceTable, WorkingRows
from worker_service.step import Logprobs, PromptLogprobs

# Prompt positions whose logits exist at the same time: bounds their memory, 128 x vocab_size float32.
_MAX_LOGITS_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Position p of a row tells of prompt token p + 1."""

    slot: int
    first: int  # the prompt token that the first position tells of
    num: int  # positions
    num_top: int
    start: int  # where the first position lies in the flat batch

    def compute(self, hidden: Tensor, told: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The raw log_softmax of the logits, at the tokens that did follow.

        `hidden`: [T, hidden_size]; `told`: [num], those tokens. Returns what `read` reads.
        """
        columns = []
        chunk = hidden[self.start : self.start + self.num]
        for part, token_ids in zip(chunk.split(_MAX_LOGITS_POSITIONS), told.split(_MAX_LOGITS_POSITIONS), strict=True):
            logprobs = compute_logits(part).log_softmax(1)
            chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
            ranks = (logprobs > chosen).sum(1) + 1
            top = logprobs.topk(self.num_top, dim=1)
            columns.append((chosen.squeeze(1), ranks, top.indices, top.values))
        return [torch.cat(parts) for parts in zip(*columns, strict=True)]

    def read(self, reading: Reading) -> PromptLogprobs:
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
        """That `read` reads."""
        return 2 * self.num * (1 + self.num_top)


def prompt_chunks(
    table: SequenceTable, rows: WorkingRows, token_starts: NDArray[np.int64], vocab_size: int
) -> Sequence[PromptChunk]:
    """Of the rows that asked and compute prompt positions, in slot order. `token_starts`: [S], in the flat batch."""
    num_asked = table.num_prompt_logprobs[rows.slots]
    num_positions = np.minimum(rows.ends, table.num_prompt_tokens[rows.slots] - 1) - rows.starts
    return [
        PromptChunk(
            slot=int(rows.slots[row]),
            first=int(rows.starts[row]) + 1,
            num=int(num_positions[row]),
            num_top=min(int(num_asked[row]), vocab_size),
            start=int(token_starts[row]),
        )
        for row in np.flatnonzero((num_asked >= 0) & (num_positions > 0))
    ]
