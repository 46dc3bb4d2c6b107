"""The scheduler's own state of requests and sequences.

A request is a group of sequences: parallel samples, or the beams of a search. A group is admitted, preempted and
resumed as a whole. Only `lifecycle.py` changes its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagewire.common.wire.messages import Pooling
from scheduler_service.core.beam import BeamSearch, BeamState, BeamStep
from scheduler_service.core.cache import Allocation, Cursor, StepCount
from scheduler_service.core.request import OutputMode, Request


class GroupState(Enum):
    """The state of a group of sequences: its activity, and the location of its KV cache blocks."""

    WAITING = "waiting"  # the worker has nothing of it
    PREPARING = "preparing"  # like WAITING, but it cannot start: the worker is preparing its grammar
    RUNNING = "running"
    SWAPPING_OUT = "swapping_out"  # its blocks are moving to the host
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"  # its blocks, or the blocks of its matched prefix, are moving to the device
    FINISHED = "finished"


# The allowed changes of state, and the event of each. `Lifecycle._enter` checks them. The diagram in ARCHITECTURE.md is
# generated from them.
TRANSITIONS = {
    (GroupState.WAITING, GroupState.PREPARING): "its grammar is not ready on this worker; other groups are not delayed",
    (GroupState.PREPARING, GroupState.WAITING): "its grammar is ready, or the worker is lost",
    (GroupState.WAITING, GroupState.RUNNING): "it is admitted, with no blocks to load",
    (GroupState.WAITING, GroupState.SWAPPING_IN): "it is admitted, and loads blocks from the host",
    (GroupState.RUNNING, GroupState.SWAPPING_OUT): "it is preempted, and its blocks are copied to the host",
    (GroupState.RUNNING, GroupState.SWAPPED): "it is preempted, and the host already has its blocks",
    (GroupState.SWAPPING_OUT, GroupState.SWAPPED): "its blocks are on the host",
    (GroupState.SWAPPED, GroupState.SWAPPING_IN): "it is resumed",
    (GroupState.SWAPPING_IN, GroupState.RUNNING): "its blocks are on the device",
    **{
        (state, GroupState.WAITING): "its blocks on the worker are lost"
        for state in (GroupState.RUNNING, GroupState.SWAPPING_OUT, GroupState.SWAPPED, GroupState.SWAPPING_IN)
    },
    **{
        (state, GroupState.FINISHED): "its last sequence has ended"
        for state in GroupState
        if state is not GroupState.FINISHED
    },
}


@dataclass(slots=True)
class DropCount:
    """The number of dropped samples, over all rows. While the number does not change, every sample in flight counts."""

    num_drops: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A session that has requests, or blocks that a later request may use (`retention.py`)."""

    free_list: int
    tenant: str
    name: str  # empty: it was found by its prefix
    last_used_at: float
    has_returned: bool = False  # it has had more than one request
    num_blocks: int = 0  # computed by its last request
    num_groups: int = 0  # waiting or running
    waiting: dict[SequenceGroup, None] = field(default_factory=dict)
    will_return: bool | None = None  # as set by its last request
    retention_s: float = 0.0  # as set by its last request
    num_gaps: int = 0  # number of gaps between requests in the mean
    mean_log_gap: float = 0.0


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences, until the last sequence has ended."""

    request: Request
    arrival: int  # sequence number of its arrival
    order: tuple[Any, ...]  # among running groups, by the policy: lower is scheduled first and preempted last
    arrived_at: float
    waiting_order: tuple[Any, ...] = ()  # among the tenant's waiting groups, by the policy: lower is next
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    state: GroupState = GroupState.WAITING
    beam: BeamGroup | None = None  # its beam search, if it is one
    # Slots that are reserved for it but have no row. A beam search keeps all its slots reserved. A group that is being
    # swapped in reserves the slots that it will need.
    reserved_slots: list[int] = field(default_factory=list)
    moved_step: int = 0  # while swapping, it waits until this step's moves are acknowledged
    num_preemptions: int = 0
    # Alternately the time when it was preempted or lost its worker, and the time when it ran again.
    pauses: tuple[float, ...] = ()
    cursor: Cursor | None = None  # of its prompt, while it waits for the first time, if its policy uses cursors
    session: Session | None = None  # set if its policy uses sessions and a worker is connected
    num_session_tokens: int = 0  # tokens that the session had computed when this request arrived
    session_age_s: float = 0.0  # seconds since the end of the session's last request, at its arrival
    is_overdue: bool = False  # it waited longer than its policy's longest wait
    num_waiting_sequences: int = 0  # its count in the queue: constant while it is queued
    uncharged_mask_tokens: float = 0.0  # below 1: the part of its mask time that is not yet charged
    # Crashes of the worker while this request was dispatched, since one of its tokens was last confirmed; and the
    # number of them in which no other request was dispatched.
    num_crashes: int = 0
    num_lone_crashes: int = 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The end tokens of the request's grammar. They end an output at any length."""
        return () if self.request.grammar is None else self.request.grammar.end_token_ids

    @property
    def is_finished(self) -> bool:
        return self.state is GroupState.FINISHED

    @property
    def has_precedence(self) -> bool:
        """Whether the group precedes groups that have waited less and have never run."""
        return self.is_overdue or bool(self.pauses)

    @property
    def must_compute_all(self) -> bool:
        """Whether one row must compute all positions of the request, from the first on.

        This holds for mean pooling. A mean is lost with its row, and no cached block contains a part of the mean.
        """
        return self.request.sampling.pooling is Pooling.MEAN

    @property
    def chooses_tokens(self) -> bool:
        """Whether its rows yield tokens, not candidates for one or embeddings."""
        sampling = self.request.sampling
        return sampling.num_candidates is None and sampling.pooling is Pooling.NONE

    @property
    def num_first_slots(self) -> int:
        """The number of slots that the group needs to start.

        A beam search moves its beams between all its rows, so it needs all slots at once. Samples can get their slots
        one after another.
        """
        return 1 if self.beam is None else self.request.num_rows

    @property
    def live_sequences(self) -> list[Sequence]:
        """The unfinished sequences of the group: samples that have not ended, or the beams of a search."""
        if self.beam is not None:
            return self.beam.beams
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def rows(self) -> list[Row]:
        """The current or last row of each sequence."""
        return [sequence.row for sequence in self.sequences if sequence.row is not None]

    @property
    def open_rows(self) -> list[Row]:
        """The rows of the group that have a slot on the worker."""
        return [row for row in self.rows if row.slot >= 0]

    @property
    def planned_step(self) -> int:
        """The last step whose plan includes any row of the group.

        No new row of the group starts until the result of this step has arrived.
        """
        return max((row.planned_step for row in self.rows), default=0)

    @property
    def rowless_sequences(self) -> list[Sequence]:
        """The unfinished sequences of the group that have no slot yet."""
        return [sequence for sequence in self.live_sequences if sequence.open_row is None]

    @property
    def swapped_allocations(self) -> list[Allocation]:
        """The block allocations of the group's sequences that have blocks on the host."""
        return [sequence.allocation for sequence in self.live_sequences if sequence.allocation.host_blocks]

    @property
    def is_bound(self) -> bool:
        """Whether only this scheduler can finish the request.

        This holds if the client has received a part of the output, or if the request is detached. Any other request
        could equally well start again on another server.
        """
        if self.request.output_mode is OutputMode.STREAMED and self.beam is None:
            return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)
        return self.request.output_mode is OutputMode.DETACHED

    def pause(self, now: float) -> None:
        """Record the time at which the group's device blocks were lost, or began to move to the host."""
        if len(self.pauses) % 2 == 0:
            self.pauses += (now,)

    def resume(self, now: float) -> None:
        """Record the time at which the group runs, for the first time or again."""
        if len(self.pauses) % 2:
            self.pauses += (now,)

    def dissolve(self) -> None:
        """Release the sequences of a group after the last of them has ended.

        This breaks the reference cycle between the group and its sequences. So both are freed with the last plan that
        refers to them, without a garbage collection.
        """
        for sequence in self.sequences:
            sequence.finish()
        self.sequences.clear()
        if self.beam is not None:
            self.beam.beams.clear()


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample of a request, or one row of a beam search: its tokens, its block allocation and its row on a worker."""

    sequence_id: int
    group: SequenceGroup
    sample_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output
    allocation: Allocation  # its allocation on the connected worker
    stop_token_ids: frozenset[int]
    num_prompt_logprobs: int | None
    is_finished: bool = False  # set by `finish`, and never reset
    has_failed: bool = False  # a row had bad logits, and its written blocks were unpublished
    row: Row | None = None  # its current row on the connected worker, or its last row there
    cumulative_logprob: float = 0.0  # for a beam
    num_cached_tokens: int = 0
    num_charged_tokens: int = 0  # tokens that need no further charge: at first its prompt
    num_prompt_logprobs_sent: int = 0
    first_scheduled_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_match(self) -> bool:
        """Whether the sequence may start from cached content."""
        return not self.wants_prompt_logprobs and not self.group.must_compute_all

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt positions are still owed.

        Their positions must be computed even if they are cached.
        """
        return self.num_prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def open_row(self) -> Row | None:
        """The sequence's row if the row has a slot, or None."""
        return self.row if self.row is not None and self.row.slot >= 0 else None

    def take_slot(self, slot: int, drops: DropCount, *, is_gated: bool) -> Row:
        """Create a row in a slot, and return it. No result of an earlier row may be in flight."""
        self.row = Row(self, self.allocation, slot, drops, is_gated, len(self.token_ids))
        return self.row

    def finish(self) -> None:
        """Mark the sequence as finished. Results that arrive later are ignored."""
        self.is_finished = True
        if self.row is not None:
            self.row.drop()
        self.row = None

    def begin_epoch(self, allocation: Allocation) -> None:
        """Forget the state on the lost worker. `holding` is the empty allocation on the new worker."""
        self.allocation, self.row = allocation, None


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's state on the worker, from the allocation of a slot until the row is vacated.

    Results of plans in flight still count after that, unless the row is dropped.
    """

    sequence: Sequence
    allocation: Allocation  # the sequence's own
    slot: int  # -1: the row was vacated
    drops: DropCount  # of all rows
    is_gated: bool  # after a sample it rests until the scheduler has chosen its next token
    # Tokens known and in flight. A decoding row is not visited, and always has one token more than it has computed.
    _num_expected: int
    is_dropped: bool = False  # never reset: no result of it counts
    planned_step: int = 0  # the last plan that includes it; while it decodes, all plans from this one on include it
    due_step: int = 0  # the plan that must examine it, for a block or its last token; 0: it does not decode
    last_step: int = 0  # if it decodes, the plan that samples its last token

    def __str__(self) -> str:
        marks = {
            "vacated": self.slot < 0,
            "gated": self.is_gated,
            "decodes": self.is_decoding,
            "dropped": self.is_dropped,
        }
        return (
            f"slot {self.slot} of sequence {self.sequence.sequence_id}: {self.allocation.num_computed_tokens} of "
            f"{self.num_expected_tokens} tokens computed, {' '.join(filter(marks.get, marks))}"
        )

    @property
    def order(self) -> tuple[Any, ...]:
        return (self.sequence.group.order, self.sequence.sample_index)

    @property
    def is_decoding(self) -> bool:
        return self.due_step > 0

    @property
    def num_expected_tokens(self) -> int:
        return self.allocation.num_computed_tokens + 1 if self.due_step else self._num_expected

    @property
    def num_in_flight(self) -> int:
        """The number of planned samples whose tokens have not arrived yet and will count."""
        return 0 if self.is_dropped else self.num_expected_tokens - len(self.allocation.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of positions to plan: tokens known and in flight, less computed positions.

        It is 0 if the tokens in flight reach the length limit, because the sequence then ends.
        """
        if self.is_gated:
            return len(self.allocation.token_ids) - self.allocation.num_computed_tokens
        num_expected = self.num_expected_tokens
        return num_expected - self.allocation.num_computed_tokens if num_expected < self.sequence.max_num_tokens else 0

    @property
    def num_settled_tokens(self) -> int:
        """The number of planned positions whose tokens are known and that will not be computed again.

        Only these positions may be published. The block of a position that may be computed again must not be shared.
        """
        return min(self.allocation.num_computed_tokens, len(self.allocation.token_ids) - self.may_repeat)

    @property
    def may_repeat(self) -> bool:
        """Whether the row's last known token may be computed again.

        This happens to a gated row after a preemption, and to a row with a grammar that was late. The blocks that this
        reads and writes must still be the row's own.
        """
        return self.is_gated or self.sequence.group.request.grammar is not None

    @property
    def next_position(self) -> int:
        """The first position that the row may compute from now on."""
        num_computed = self.allocation.num_computed_tokens
        return min(num_computed, len(self.allocation.token_ids) - 1) if self.may_repeat else num_computed

    def plan(self, step: int, num_tokens: int, *, samples: bool) -> None:
        """Count the work that the plan of `step` gives to the row: `num_tokens` more positions, and a sample if
        `samples` is true."""
        self.planned_step = step
        self.allocation.compute(num_tokens)
        self._num_expected += samples

    def reported(self) -> None:
        """Record that the candidates of a beam have arrived. No sample is in flight."""
        self._num_expected = len(self.allocation.token_ids)

    def append_token(self, token_id: int) -> None:
        """Append the next token to a gated row, which waits for the scheduler's choice after each sample."""
        self.allocation.token_ids.append(token_id)
        self._num_expected = len(self.allocation.token_ids)

    def repeat(self) -> None:
        """Record that the row's next sample in flight will not arrive.

        The position before the sample is computed again, if it has been computed.
        """
        self._num_expected -= 1
        self.allocation.compute_again(self._num_expected - 1)

    def rewind(self) -> None:
        """Drop the row's results in flight. The sequence's next row computes the last token again."""
        self.drop()
        self.allocation.compute_again(len(self.allocation.token_ids) - 1)

    def drop(self) -> None:
        """Drop the row's samples in flight. They will not count."""
        self.drops.num_drops += self.num_in_flight > 0
        self.is_dropped = True

    def vacate(self) -> None:
        """Give up the row's slot. Samples in flight still count."""
        self.slot = -1

    def join_decoding(self, steps: StepCount) -> None:
        """Count one token and one sample for every plan from the next plan on."""
        self.last_step = steps.num_steps + self.sequence.max_num_tokens - self._num_expected
        self.allocation.join_decoding(steps)

    def due_by(self, block_step: int) -> int:
        """Set the plan that must next examine this decoding row, and return it.

        `block_step` is the plan in which the row needs its next block. The plan of its last token may be earlier.
        """
        self.due_step = min(block_step, self.last_step)
        return self.due_step

    def leave_decoding(self, steps: StepCount) -> None:
        """Stop counting a token for every plan. `plan` counts tokens again."""
        self.planned_step, self._num_expected, self.due_step = steps.num_steps, self.num_expected_tokens, 0
        self.allocation.leave_decoding()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The running beam search of a group. The group's sequences represent rows, and beams move between these rows."""

    search: BeamSearch
    output_ids: list[int]  # sequence ids of the hypotheses, best first
    beams: list[Sequence]  # sequences with the running beams, best first
    # Candidates reported since the last selection, by beam: (token id, logprob), best first.
    candidates: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    # Changes of the last selection that no plan contains yet.
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    new_slots: set[int] = field(default_factory=set)  # targets of these forks that have no row on the worker yet
    num_tokens: int = 0  # tokens with which its beams have continued, in total

    def report(self, beam: Sequence, candidates: list[tuple[int, float]]) -> bool:
        """Store the candidates of a beam. Returns whether all beams have reported, so that `select` can be called."""
        self.candidates[beam] = candidates
        return len(self.candidates) == len(self.beams)

    def select(self) -> BeamStep:
        """Choose the next beams from the candidates of all beams."""
        states = [BeamState(beam.cumulative_logprob, beam.token_ids[beam.num_prompt_tokens :]) for beam in self.beams]
        step = self.search.advance(states, [self.candidates[beam] for beam in self.beams])
        self.candidates.clear()
        return step

    def forget_step(self) -> None:
        """Discard the candidates since the last selection, and the changes that no plan contains yet."""
        self.candidates.clear()
        self.forget_changes()

    def forget_changes(self) -> None:
        """Discard the changes of the last selection."""
        self.forks.clear()
        self.appended.clear()
        self.new_slots.clear()
