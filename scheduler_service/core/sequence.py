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
    """The state of a request's sequence group: whether it waits, runs or is preempted, and where its KV cache blocks
    are."""

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
    """A counter, shared by all rows of a worker, of the events after which a planned sample is ignored or handled
    individually.

    Each plan in flight records the count at its dispatch. If the count is unchanged when the result arrives, every
    sample counts, and no row must be checked.
    """

    num_drops: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A session: a series of requests of one tenant, in which each prompt starts with the previous prompt and output.

    The scheduler remembers a session while it has requests or idle KV cache blocks that a later request may use. See
    `retention.py`.
    """

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
    """A request and its sequences (samples, or the beams of a beam search), from arrival until the last sequence has
    ended."""

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
        """The end tokens of the request's grammar; empty if the request has no grammar. These tokens end an output of
        any length, even below `min_tokens`."""
        return () if self.request.grammar is None else self.request.grammar.end_token_ids

    @property
    def is_finished(self) -> bool:
        return self.state is GroupState.FINISHED

    @property
    def has_precedence(self) -> bool:
        """Whether the request goes before waiting requests that arrived recently and have never run. This holds if the
        request has been interrupted after it ran, or if it has waited longer than the policy's longest wait."""
        return self.is_overdue or bool(self.pauses)

    @property
    def must_compute_all(self) -> bool:
        """Whether one row must compute all positions of the request itself, without prefix cache hits.

        This holds for embeddings with mean pooling. The running mean is part of the row (the worker's state of the
        sequence) and is lost with the row. No cached KV block contains a part of the mean.
        """
        return self.request.sampling.pooling is Pooling.MEAN

    @property
    def chooses_tokens(self) -> bool:
        """Whether the worker samples tokens for this request. It is false for beam searches, where the worker returns
        candidate tokens, and for embeddings."""
        sampling = self.request.sampling
        return sampling.num_candidates is None and sampling.pooling is Pooling.NONE

    @property
    def num_first_slots(self) -> int:
        """The number of free slots on the worker that the request needs to start. A slot holds one running sequence.

        A beam search needs slots for all its beams at once, because beams move between the slots. Parallel samples can
        get their slots one after another, so the number is 1.
        """
        return 1 if self.beam is None else self.request.num_rows

    @property
    def live_sequences(self) -> list[Sequence]:
        """The unfinished sequences of the request: the samples that have not ended, or the running beams of a beam
        search."""
        if self.beam is not None:
            return self.beam.beams
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def rows(self) -> list[Row]:
        """The latest row of each sequence of the request. A row is the worker's state of one running sequence, and may
        have been vacated already."""
        return [sequence.row for sequence in self.sequences if sequence.row is not None]

    @property
    def open_rows(self) -> list[Row]:
        """The rows (the worker's states of running sequences) of this request that still have a slot on the worker."""
        return [row for row in self.rows if row.slot >= 0]

    @property
    def planned_step(self) -> int:
        """The number of the last step plan that computes any sequence of this request; 0 if there is none.

        After a preemption, the request does not resume until the result of this step has arrived.
        """
        return max((row.planned_step for row in self.rows), default=0)

    @property
    def rowless_sequences(self) -> list[Sequence]:
        """The unfinished sequences of the request that do not have a slot on the worker yet."""
        return [sequence for sequence in self.live_sequences if sequence.open_row is None]

    @property
    def swapped_allocations(self) -> list[Allocation]:
        """The block allocations of the unfinished sequences that have KV cache blocks on the host, because the request
        was swapped out."""
        return [sequence.allocation for sequence in self.live_sequences if sequence.allocation.host_blocks]

    @property
    def is_bound(self) -> bool:
        """Whether only this scheduler can finish the request.

        This holds if the client has received a part of the output, or if the request is detached (it runs without a
        client connection). Any other request could equally well start again on another server.
        """
        if self.request.output_mode is OutputMode.STREAMED and self.beam is None:
            return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)
        return self.request.output_mode is OutputMode.DETACHED

    def pause(self, now: float) -> None:
        """Record when the request was interrupted: its KV cache blocks were lost, or began to move to the host. `now`
        is in seconds of the caller's clock."""
        if len(self.pauses) % 2 == 0:
            self.pauses += (now,)

    def resume(self, now: float) -> None:
        """Record when an interrupted request runs again. `now` is in seconds of the caller's clock. Does nothing when
        the request runs for the first time."""
        if len(self.pauses) % 2:
            self.pauses += (now,)

    def dissolve(self) -> None:
        """Break the reference cycles between a finished request and its sequences.

        Python then frees the objects together with the last plan that refers to them, without a run of the garbage
        collector.
        """
        for sequence in self.sequences:
            sequence.finish()
        self.sequences.clear()
        if self.beam is not None:
            self.beam.beams.clear()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, or one beam of a beam search: the token ids, the allocated KV cache blocks, and the row
    on the worker."""

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
        """Whether the sequence may start from prefix cache hits. It may not while it owes log-probabilities of prompt
        tokens, or if the request needs mean pooling."""
        return not self.wants_prompt_logprobs and not self.group.must_compute_all

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client still has to receive log-probabilities of prompt tokens.

        Log-probabilities are not cached. So their positions must be computed even if the KV cache already contains
        them.
        """
        return self.num_prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def open_row(self) -> Row | None:
        """The sequence's row (its state on the worker), or None if the sequence has no slot on the worker."""
        return self.row if self.row is not None and self.row.slot >= 0 else None

    def take_slot(self, slot: int, drops: DropCount, *, is_gated: bool) -> Row:
        """Create the row of this sequence in a slot of the worker, and return the row.

        A gated row (`is_gated`) rests after each sample until the scheduler has chosen its next token. No result of an
        earlier row of the sequence may be in flight.
        """
        self.row = Row(self, self.allocation, slot, drops, is_gated, len(self.token_ids))
        return self.row

    def finish(self) -> None:
        """Mark the sequence as finished. Results for this sequence that arrive later are ignored."""
        self.is_finished = True
        if self.row is not None:
            self.row.drop()
        self.row = None

    def begin_epoch(self, allocation: Allocation) -> None:
        """Forget the sequence's state on the lost worker. `allocation` is an empty block allocation for the next
        worker."""
        self.allocation, self.row = allocation, None


@dataclass(slots=True, eq=False)
class Row:
    """The worker's state of one running sequence, as the scheduler tracks it.

    A row begins when the sequence gets a slot on the worker, and ends when the slot is given up. Results of plans sent
    before the end still count, unless the row is dropped.
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
        """The number of tokens that plans in flight sample for this running sequence and that the scheduler will use.
        It is 0 for a dropped row."""
        return 0 if self.is_dropped else self.num_expected_tokens - len(self.allocation.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of token positions of this running sequence that still have to be planned. Tokens that plans in
        flight will sample are included.

        It is 0 if the tokens in flight reach the sequence's length limit, because the sequence then ends.
        """
        if self.is_gated:
            return len(self.allocation.token_ids) - self.allocation.num_computed_tokens
        num_expected = self.num_expected_tokens
        return num_expected - self.allocation.num_computed_tokens if num_expected < self.sequence.max_num_tokens else 0

    @property
    def num_settled_tokens(self) -> int:
        """The number of planned positions of this running sequence whose tokens are known and that will not be computed
        again.

        Only these positions may be published in the prefix index. The block of a position that may be computed again
        must not be shared.
        """
        return min(self.allocation.num_computed_tokens, len(self.allocation.token_ids) - self.may_repeat)

    @property
    def may_repeat(self) -> bool:
        """Whether the position of the sequence's last known token may be computed a second time.

        This happens after a preemption if the row is gated (it waits for the scheduler's choice after each sample). It
        also happens if a grammar mask was not ready in time. The KV cache blocks that the second computation reads and
        writes must still belong to this sequence.
        """
        return self.is_gated or self.sequence.group.request.grammar is not None

    @property
    def next_position(self) -> int:
        """The first token position that this running sequence may compute from now on. The KV cache blocks that this
        position reads must be kept."""
        num_computed = self.allocation.num_computed_tokens
        return min(num_computed, len(self.allocation.token_ids) - 1) if self.may_repeat else num_computed

    def plan(self, step: int, num_tokens: int, *, samples: bool) -> None:
        """Record that the plan of `step` computes `num_tokens` more positions of this running sequence. If `samples` is
        true, the plan also samples the next token."""
        self.planned_step = step
        self.allocation.compute(num_tokens)
        self._num_expected += samples

    def reported(self) -> None:
        """Record that the worker has reported the candidates for a beam's next token. No sample of this beam is in
        flight any more."""
        self._num_expected = len(self.allocation.token_ids)

    def append_token(self, token_id: int) -> None:
        """Append the token that the scheduler has chosen to a gated row (a row that waits for the scheduler's choice
        after each sample)."""
        self.allocation.token_ids.append(token_id)
        self._num_expected = len(self.allocation.token_ids)

    def repeat(self) -> None:
        """Record that one planned sample of this running sequence will not arrive, because its grammar mask was not
        ready in time.

        The position before the sample is computed again, if it has been computed.
        """
        self._num_expected -= 1
        self.allocation.compute_again(self._num_expected - 1)

    def rewind(self) -> None:
        """Ignore the results of this running sequence that have not arrived yet. After the interruption, the position
        of the last token is computed again."""
        self.drop()
        self.allocation.compute_again(len(self.allocation.token_ids) - 1)

    def drop(self) -> None:
        """Ignore the sampled tokens of this row (the worker's state of one running sequence) that have not arrived
        yet."""
        self.drops.num_drops += self.num_in_flight > 0
        self.is_dropped = True

    def vacate(self) -> None:
        """Mark this row (the worker's state of one running sequence) as without a slot on the worker. Samples that are
        still in flight count when they arrive."""
        self.slot = -1

    def join_decoding(self, steps: StepCount) -> None:
        """Begin to count one computed position and one sampled token for every plan, starting with the next plan.
        Decoding rows are then not visited in each plan."""
        self.last_step = steps.num_steps + self.sequence.max_num_tokens - self._num_expected
        self.allocation.join_decoding(steps)

    def set_due_step(self, block_step: int) -> int:
        """Set and return the step in which the scheduler must next examine this decoding sequence.

        `block_step` is the step in which the sequence needs its next KV cache block. The result is lower if the last
        token is sampled in an earlier step.
        """
        self.due_step = min(block_step, self.last_step)
        return self.due_step

    def leave_decoding(self, steps: StepCount) -> None:
        """Stop counting one token of this running sequence for every plan. Each later plan counts its tokens by a call
        of `plan`."""
        self.planned_step, self._num_expected, self.due_step = steps.num_steps, self.num_expected_tokens, 0
        self.allocation.leave_decoding()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The state of a request's running beam search.

    The request's sequences stand for rows on the worker, and beams move between these rows.
    """

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
        """Store the candidates for the next token of one beam, as (token id, log-probability) pairs.

        Return whether all beams now have candidates, so that `select` can be called.
        """
        self.candidates[beam] = candidates
        return len(self.candidates) == len(self.beams)

    def select(self) -> BeamStep:
        """Choose the beams of the next step from the candidates of all current beams. Return the chosen beams, and
        whether the search has ended."""
        states = [BeamState(beam.cumulative_logprob, beam.token_ids[beam.num_prompt_tokens :]) for beam in self.beams]
        step = self.search.advance(states, [self.candidates[beam] for beam in self.beams])
        self.candidates.clear()
        return step

    def forget_step(self) -> None:
        """Discard the candidates that arrived since the last selection of beams, and the row changes that have not been
        sent to the worker."""
        self.candidates.clear()
        self.forget_changes()

    def forget_changes(self) -> None:
        """Discard the changes of rows (forks, appended tokens, new slots) from the last selection of beams."""
        self.forks.clear()
        self.appended.clear()
        self.new_slots.clear()
