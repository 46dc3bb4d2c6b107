"""The last events of the prefix cache, in numbered batches, for subscribers who come, go and come back.

Pure: whoever appends wakes whoever waits. What is held is bounded in batches and in tokens; the oldest goes first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.core.request import BlockStored, KvEvent

# Tokens of stored blocks that the batches may name together: some 150 MB, whatever the number of batches.
_MAX_TOKENS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """What happened to the cache at once; or, as a snapshot, its content after the batch of this number."""

    sequence_number: int
    events: tuple[KvEvent, ...]


class KvEventLog:
    """A ring of batches. Numbers begin at 1 and rise by 1."""

    def __init__(self, max_batches: int, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_batches = max_batches
        self._max_tokens = max_tokens
        self._batches: deque[KvEventBatch] = deque()
        self._num_tokens = 0
        self.last_sequence_number = 0

    @property
    def first_start(self) -> int:
        """The smallest number after which everything is held. The greatest is `last_sequence_number`."""
        return self.last_sequence_number - len(self._batches)

    def append(self, events: Sequence[KvEvent]) -> None:
        self.last_sequence_number += 1
        self._batches.append(KvEventBatch(self.last_sequence_number, tuple(events)))
        self._num_tokens += _num_tokens(events)
        while len(self._batches) > self._max_batches or (self._num_tokens > self._max_tokens and self._batches):
            self._num_tokens -= _num_tokens(self._batches.popleft().events)

    def after(self, sequence_number: int) -> KvEventBatch | None:
        """The batch after this one, or None while there is none. Raises LookupError outside the range of starts."""
        if not self.first_start <= sequence_number <= self.last_sequence_number:
            raise LookupError(sequence_number)
        if sequence_number == self.last_sequence_number:
            return None
        return self._batches[sequence_number - self.first_start]


def _num_tokens(events: Sequence[KvEvent]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, BlockStored))
