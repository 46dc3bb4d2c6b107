"""Embeddings of rows: final hidden states, pooled and scaled to length 1, for the rows that ask for one.

A mean goes on from step to step as a sum by slot, of float64. Tokens are added one after the other, so that the sum is
the same however a prompt is cut into steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import Pooling, RowStatus
from worker_service.rows.reading import ValueReader
from worker_service.rows.sampling import Samples
from worker_service.rows.table import SequenceTable, WorkingRows

# Positions that are widened to float64 at the same time: bounds their memory.
_MAX_POSITIONS = 128
_MIN_LENGTH = 1e-12  # of a vector that can be scaled


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Positions of a row that asks for an embedding."""

    slot: int
    pooling: Pooling
    start: int  # where the first position lies in the flat batch
    num: int  # positions
    num_before: int  # positions of the row that earlier steps have computed
    is_last: bool  # the row reaches its end, and reports its embedding


class Pooler:
    """The sums of the rows whose mean is asked for, by slot. A chunk that begins its row begins a new sum."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Return an embedding [hidden_size] float32 for each chunk that is its row's last, and what `keep` keeps.

        `hidden`: [T, hidden_size], final hidden states. Nothing changes by it, so that it may be done again.
        """
        embeddings = []
        sums: dict[int, Tensor] = {}
        for chunk in chunks:
            positions = hidden[chunk.start : chunk.start + chunk.num]
            if chunk.pooling is Pooling.MEAN:
                before = self._sums[chunk.slot] if chunk.num_before else torch.zeros_like(positions[0]).double()
                pooled = sums[chunk.slot] = _add(before, positions)
            else:
                pooled = positions[-1].double()
            if chunk.is_last:
                embeddings.append((pooled / pooled.norm().clamp_min(_MIN_LENGTH)).float())
        return embeddings, sums

    def keep(self, chunks: Sequence[PooledChunk], sums: dict[int, Tensor]) -> None:
        """The chunks are computed: their rows go on with these sums."""
        self._sums.update(sums)
        for chunk in chunks:
            if chunk.is_last:
                self._sums.pop(chunk.slot, None)


def _add(total: Tensor, positions: Tensor) -> Tensor:
    """The sum of a vector and [N, hidden_size] more, one after the other."""
    for piece in positions.split(_MAX_POSITIONS):
        total = torch.cat([total[None], piece.double()]).cumsum(0)[-1]
    return total


def pooled_chunks(
    table: SequenceTable, rows: WorkingRows, token_starts: NDArray[np.int64] | None = None
) -> list[PooledChunk]:
    """Return the chunks of the rows of a step that ask for embeddings, in slot order.

    `token_starts`: [S], where each row's tokens lie in the flat batch; left out, one row lies behind the other.
    """
    if rows.are_plain:
        return []
    if token_starts is None:
        token_starts = np.cumsum(rows.num_new_tokens) - rows.num_new_tokens
    return [
        PooledChunk(
            slot=int(rows.slots[row]),
            pooling=table.sampling.params[rows.slots[row]].pooling,
            start=int(token_starts[row]),
            num=int(rows.num_new_tokens[row]),
            num_before=int(rows.starts[row]),
            is_last=bool(rows.ends[row] == table.num_tokens[rows.slots[row]]),
        )
        for row in np.flatnonzero(table.sampling.is_pooled[rows.slots])
    ]


def choosing_rows(table: SequenceTable, rows: WorkingRows) -> WorkingRows:
    """Return the rows of a step, of which those that ask for an embedding have no logits and choose no token."""
    if rows.are_plain:
        return rows
    samples = rows.samples & ~table.sampling.is_pooled[rows.slots]
    return WorkingRows(rows.slots, rows.starts, rows.num_new_tokens, samples)


def read_embeddings(
    samples: Samples,
    slots: NDArray[np.int64],
    chunks: Sequence[PooledChunk],
    reading: ValueReader,
    hidden_size: int,
) -> Samples:
    """Read what `Pooler.pool` returned for the chunks. Return the samples of the rows in `slots`, which choose tokens,
    with those of the chunks' rows among them, in slot order."""
    if not any(chunk.is_last for chunk in chunks):
        return samples
    statuses = dict(zip(slots.tolist(), samples.statuses or (RowStatus.OK,) * len(slots), strict=True))
    embeddings = []
    for chunk in chunks:
        if chunk.is_last:
            embedding = reading.floats(hidden_size)
            is_good = bool(np.isfinite(embedding).all())
            statuses[chunk.slot] = RowStatus.OK if is_good else RowStatus.NAN_LOGITS
            if is_good:
                embeddings.append(embedding.astype("<f4").tobytes())
    in_order = tuple(status for _, status in sorted(statuses.items(), key=itemgetter(0)))
    is_any_bad = any(status is not RowStatus.OK for status in in_order)
    return replace(samples, statuses=in_order if is_any_bad else (), embeddings=tuple(embeddings))
