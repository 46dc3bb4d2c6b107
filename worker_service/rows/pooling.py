"""Embeddings of rows: final hidden states, pooled and scaled to length 1.

A mean is accumulated over steps as a float64 sum by slot. Tokens are added one after the other, so the sum does not
depend on how a prompt is split into steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.common.wire.messages import Pooling, RowStatus
from worker_service.models.dense import DenseLayer
from worker_service.rows.reading import ValueReader
from worker_service.rows.sampling import Samples
from worker_service.rows.table import SequenceTable
from worker_service.rows.working_rows import WorkingRows

# Positions that are converted to float64 together. The limit bounds the memory for them.
_MAX_POSITIONS = 128
_MIN_LENGTH = 1e-12  # smallest norm that an embedding is divided by


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The prompt positions that one step computes for an embedding request. A long prompt takes several steps."""

    slot: int
    pooling: Pooling
    start: int  # index of the first position in the flat batch
    num: int  # positions
    num_before: int  # positions of the row that earlier steps computed
    is_last: bool  # whether the row reaches its end and reports its embedding


class Pooler:
    """A pooler that computes embeddings from final hidden states: the mean over a prompt, or the last token's state.
    Dense layers may follow.

    If a mean takes several steps, the pooler keeps the running sum of the prompt, by slot (the index of the sequence in
    the worker's table). The first chunk of a prompt starts a new sum.
    """

    def __init__(self, dense: Sequence[DenseLayer] = ()) -> None:
        """Create a pooler. The layers in `dense` are applied to each pooled vector, one after the other."""
        self._dense = dense
        self._sums: dict[int, Tensor] = {}

    def embedding_size(self, hidden_size: int) -> int:
        """Return the number of values of an embedding, for hidden states of the given size."""
        return len(self._dense[-1].weight) if self._dense else hidden_size

    def pool(self, hidden: Tensor, chunks: Sequence[PooledChunk]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Pool the hidden states of one step. Return (embeddings, sums).

        `embeddings` has one tensor, [embedding_size] float32 of length 1, for each chunk that ends its prompt. `sums`
        are the updated running sums by slot; pass them to `keep`. `hidden` [T, hidden_size] contains the final hidden
        states. The call changes no state, so it can be repeated.
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
                pooled = self._project(pooled, chunk)
                embeddings.append((pooled / pooled.norm().clamp_min(_MIN_LENGTH)).float())
        return embeddings, sums

    def _project(self, pooled: Tensor, chunk: PooledChunk) -> Tensor:
        """Apply the dense layers, if there are any, to the last state or the sum of states of a prompt that ends."""
        if self._dense and chunk.pooling is Pooling.MEAN:
            pooled = pooled / (chunk.num_before + chunk.num)
        for layer in self._dense:
            pooled = layer.apply(pooled)
        return pooled

    def keep(self, chunks: Sequence[PooledChunk], sums: dict[int, Tensor]) -> None:
        """Store the sums that `pool` returned. Discard the sums of prompts whose embedding is finished."""
        self._sums.update(sums)
        for chunk in chunks:
            if chunk.is_last:
                self._sums.pop(chunk.slot, None)


def _add(total: Tensor, positions: Tensor) -> Tensor:
    """Add the vectors of `positions` [N, hidden_size] to the vector `total` one after the other. Return the sum.

    The sum is float64. The fixed order makes the result independent of how a prompt is split into steps.
    """
    for piece in positions.split(_MAX_POSITIONS):
        total = torch.cat([total[None], piece.double()]).cumsum(0)[-1]
    return total


def pooled_chunks(
    table: SequenceTable, rows: WorkingRows, token_starts: NDArray[np.int64] | None = None
) -> list[PooledChunk]:
    """Return the prompt positions of each sequence of a step that requests an embedding, in slot order.

    `token_starts` [S] is the offset of each sequence's tokens in the step's flat batch of tokens. If omitted, the
    tokens of the sequences follow one another in slot order.
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
    """Return the sequences of a step, and mark those that request an embedding as not sampling.

    No logits are computed for these sequences, and no token is sampled.
    """
    if rows.are_plain:
        return rows
    samples = rows.samples & ~table.sampling.is_pooled[rows.slots]
    return WorkingRows(rows.slots, rows.starts, rows.num_new_tokens, samples)


def read_embeddings(
    samples: Samples,
    slots: NDArray[np.int64],
    chunks: Sequence[PooledChunk],
    reading: ValueReader,
    embedding_size: int,
) -> Samples:
    """Read the embeddings that `Pooler.pool` returned and add them to a step's samples, in slot order.

    `slots` are the slots of the sequences that sample tokens. An embedding that is not finite is left out, and its
    sequence gets the status NAN_LOGITS. The other embeddings are stored as bytes, little-endian float32.
    """
    if not any(chunk.is_last for chunk in chunks):
        return samples
    statuses = dict(zip(slots.tolist(), samples.statuses or (RowStatus.OK,) * len(slots), strict=True))
    embeddings = []
    for chunk in chunks:
        if chunk.is_last:
            embedding = reading.floats(embedding_size)
            is_good = bool(np.isfinite(embedding).all())
            statuses[chunk.slot] = RowStatus.OK if is_good else RowStatus.NAN_LOGITS
            if is_good:
                embeddings.append(embedding.astype("<f4").tobytes())
    in_order = tuple(status for _, status in sorted(statuses.items(), key=itemgetter(0)))
    is_any_bad = any(status is not RowStatus.OK for status in in_order)
    return replace(samples, statuses=in_order if is_any_bad else (), embeddings=tuple(embeddings))
