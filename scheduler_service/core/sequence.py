"""The scheduler's own state of requests and sequences, and the ordered set it keeps them in."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.prefix_index import Node, RootKey
from scheduler_service.core.request import Request


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """A request until its last sequence has ended."""

    request: Request
    sequences: list["Sequence"] = field(default_factory=list)
    num_unfinished: int = 0
    # Crashes of the worker since a token of this request was last confirmed, with the request dispatched; and those of
    # them in which nothing else was.
    num_crashes: int = 0
    num_lone_crashes: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        return self.sequences[0].order


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample of a request: its tokens and where their K and V are."""

    sequence_id: int
    owner: RequestState
    sample_index: int
    order: tuple[int, int, int]  # priority, arrival, sample index: lower is served first
    arrived_at: float
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output
    root_key: RootKey
    stop_token_ids: frozenset[int]
    num_prompt_logprobs: int | None
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    node: Node | None = None  # of the last block of the table that is published or was matched
    num_published_blocks: int = 0
    num_matched_blocks: int = 0
    # Samples planned in an earlier life of a sequence whose blocks turned out bad belong to another attempt.
    attempt: int = 0
    num_cached_tokens: int = 0
    num_prompt_logprobs_sent: int = 0
    reports_prompt_logprobs: bool = False  # whether its row was opened with them
    first_scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions to plan: computed chases known plus in flight, and stops where the length limit will end it."""
        num_expected = len(self.token_ids) + self.num_in_flight
        return num_expected - self.num_computed_tokens if num_expected < self.max_num_tokens else 0

    def forget_cache(self) -> None:
        """Nothing of the sequence is computed any more. What its last row matched is remembered: results of that row
        may be on their way."""
        self.slot = -1
        self.block_table.clear()
        self.node = None
        self.num_computed_tokens = self.num_published_blocks = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be computed for their log-probabilities, cached or not."""
        return self.num_prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1


class SequenceQueue:
    """Sequences in the order in which they are served."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self) -> Sequence:
        return self._sequences[0]

    def last(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=lambda queued: queued.order)
        self.num_prompt_tokens += sequence.num_prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=lambda queued: queued.order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise RuntimeError(f"sequence {sequence.sequence_id} is not in this queue")
        del self._sequences[index]
        self.num_prompt_tokens -= sequence.num_prompt_tokens

    def snapshot(self) -> list[Sequence]:
        return self._sequences.copy()
