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
    """The state of a request in the scheduler: whether it waits, runs or is preempted, and whether its KV cache is on
    the device or on the host."""

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
    """A counter of the events after which the scheduler must check each planned sample, for example because a sequence
    has ended early. All sequences on a worker share it.

    Each plan in flight stores the count at the time when it was sent. If the count is still the same when the result
    arrives, all samples of the result are valid, and the scheduler skips the checks.
    """

    num_drops: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A series of requests of one tenant, such as a conversation, in which each prompt starts with the previous prompt
    and output.

    The scheduler keeps a session while it has requests, or idle KV cache blocks that a later request may use. See
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
    """A request in the scheduler, from its arrival until its last sequence has ended. Its sequences are parallel
    samples, or the beams of a beam search."""

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
        """The end tokens of the request's grammar, or an empty tuple without a grammar. These tokens end an output of
        any length, even if it is shorter than `min_tokens`."""
        return () if self.request.grammar is None else self.request.grammar.end_token_ids

    @property
    def is_finished(self) -> bool:
        return self.state is GroupState.FINISHED

    @property
    def has_precedence(self) -> bool:
        """Whether the request is scheduled before new requests that wait. This is true if the request was interrupted
        after it had started, or if it has waited longer than the policy's longest wait."""
        return self.is_overdue or bool(self.pauses)

    @property
    def must_compute_all(self) -> bool:
        """Whether the worker must compute all positions of the request without prefix cache hits and without losing its
        state of the sequence.

        This is true for embeddings with mean pooling. The running mean is part of the worker's state of the sequence,
        and cached KV blocks do not contain it.
        """
        return self.request.sampling.pooling is Pooling.MEAN

    @property
    def chooses_tokens(self) -> bool:
        """Whether the worker samples tokens for this request. This is false for a beam search, for which the worker
        returns candidate tokens, and for embeddings."""
        sampling = self.request.sampling
        return sampling.num_candidates is None and sampling.pooling is Pooling.NONE

    @property
    def num_first_slots(self) -> int:
        """The number of free slots on the worker that the request needs in order to start. A slot holds one running
        sequence.

        A beam search needs the slots for all its beams at once, because beams move between the slots. Parallel samples
        need only one, because they can start one after another.
        """
        return 1 if self.beam is None else self.request.num_rows

    @property
    def live_sequences(self) -> list[Sequence]:
        """The sequences of the request that have not ended: unfinished parallel samples, or the current beams of a beam
        search."""
        if self.beam is not None:
            return self.beam.beams
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def rows(self) -> list[Row]:
        """The latest row (the worker's state of one running sequence) of each sequence of the request. A row may have
        given up its slot on the worker already."""
        return [sequence.row for sequence in self.sequences if sequence.row is not None]

    @property
    def open_rows(self) -> list[Row]:
        """The rows (the worker's states of running sequences) of this request that still have a slot on the worker."""
        return [row for row in self.rows if row.slot >= 0]

    @property
    def planned_step(self) -> int:
        """The number of the last step plan that computes any sequence of this request, or 0 if there is no such plan.

        A preempted request does not resume before the result of this step has arrived.
        """
        return max((row.planned_step for row in self.rows), default=0)

    @property
    def rowless_sequences(self) -> list[Sequence]:
        """The unfinished sequences of the request that do not have a slot on the worker yet."""
        return [sequence for sequence in self.live_sequences if sequence.open_row is None]

    @property
    def swapped_allocations(self) -> list[Allocation]:
        """The KV cache allocations of the unfinished sequences that were swapped out and have blocks on the host."""
        return [sequence.allocation for sequence in self.live_sequences if sequence.allocation.host_blocks]

    @property
    def is_bound(self) -> bool:
        """Whether only this server can finish the request. If false, the request could equally well start again on
        another server.

        It is true if the client has already received a part of the output, or if the request runs without a client
        connection (detached).
        """
        if self.request.output_mode is OutputMode.STREAMED and self.beam is None:
            return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)
        return self.request.output_mode is OutputMode.DETACHED

    def pause(self, now: float) -> None:
        """Record the time `now` at which a running request was interrupted: it lost its KV cache, or is being swapped
        out to the host. `now` is in seconds of the caller's clock."""
        if len(self.pauses) % 2 == 0:
            self.pauses += (now,)

    def resume(self, now: float) -> None:
        """Record the time `now` at which an interrupted request runs again, in seconds of the caller's clock. Does
        nothing if the request was not interrupted."""
        if len(self.pauses) % 2:
            self.pauses += (now,)

    def dissolve(self) -> None:
        """Break the reference cycles between a finished request and its sequences, so that Python frees them without a
        run of the garbage collector. They are freed when the last plan that refers to them is freed."""
        for sequence in self.sequences:
            sequence.finish()
        self.sequences.clear()
        if self.beam is not None:
            self.beam.beams.clear()


@dataclass(slots=True, eq=False)
class Sequence:
    """One parallel sample of a request, or one beam of a beam search. A sequence has its token ids, its KV cache blocks
    and, while it runs, its state on the worker (a row)."""

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
        """Whether the sequence may start from a prefix cache hit. This is false if log-probabilities of its prompt
        tokens must still be computed, or if the request needs mean pooling."""
        return not self.wants_prompt_logprobs and not self.group.must_compute_all

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client still has to receive log-probabilities of prompt tokens.

        The worker must then compute these positions even if their K and V are cached, because log-probabilities are not
        cached.
        """
        return self.num_prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def open_row(self) -> Row | None:
        """The sequence's row (its state on the worker), or None if the sequence has no slot on the worker."""
        return self.row if self.row is not None and self.row.slot >= 0 else None

    def take_slot(self, slot: int, drops: DropCount, *, is_gated: bool, may_be_leased: bool) -> Row:
        """Create a row (the worker's state of this sequence) in the given slot of the worker, and return the row.

        If `is_gated` is true, the worker does not compute the sequence after a sample until the scheduler has chosen
        the next token. `may_be_leased` says whether the worker accepts leases. No result of an earlier row of the
        sequence may be in flight.
        """
        may_repeat = is_gated or may_be_leased or self.group.request.grammar is not None
        self.row = Row(self, self.allocation, slot, drops, is_gated, may_repeat, len(self.token_ids))
        return self.row

    def finish(self) -> None:
        """Mark the sequence as finished. Results for this sequence that arrive later are ignored."""
        self.is_finished = True
        if self.row is not None:
            self.row.drop()
        self.row = None

    def begin_epoch(self, allocation: Allocation) -> None:
        """Remove the sequence's state on the lost worker. `allocation` has no blocks, and will hold the sequence's KV
        cache blocks on the next worker."""
        self.allocation, self.row = allocation, None


@dataclass(slots=True, eq=False)
class Row:
    """The scheduler's record of the state that the worker keeps for one running sequence.

    A row exists while the sequence has a slot on the worker. After that, results of earlier plans are still used,
    unless the row was dropped (see `drop`).
    """

    sequence: Sequence
    allocation: Allocation  # the sequence's own
    slot: int  # -1: the row was vacated
    drops: DropCount  # of all rows
    is_gated: bool  # after a sample it rests until the scheduler has chosen its next token
    # A plan may have to include the position of the last known token a second time: because a grammar's mask was not
    # ready in time, because a lease ended early or, of a gated row, after a preemption. The sequence then keeps the
    # blocks for it.
    may_repeat: bool
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
        """The number of tokens that plans in flight sample for this sequence. It is 0 if the scheduler will ignore
        these tokens, because the row was dropped."""
        return 0 if self.is_dropped else self.num_expected_tokens - len(self.allocation.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of token positions of this sequence that still have to be planned. The positions of tokens that
        plans in flight will sample are included.

        It is 0 if the sequence reaches its length limit with the tokens in flight, because the sequence then ends.
        """
        if self.is_gated:
            return len(self.allocation.token_ids) - self.allocation.num_computed_tokens
        num_expected = self.num_expected_tokens
        return num_expected - self.allocation.num_computed_tokens if num_expected < self.sequence.max_num_tokens else 0

    @property
    def num_settled_tokens(self) -> int:
        """The number of positions of this sequence whose KV cache content is final: they are planned, their tokens are
        known, and they will not be computed again.

        Only these positions may be published in the prefix index. A block with a position that may be computed again
        must not be shared.
        """
        return min(self.allocation.num_computed_tokens, len(self.allocation.token_ids) - self.may_repeat)

    @property
    def next_position(self) -> int:
        """The lowest token position that the worker may still compute for this sequence. KV cache blocks that this
        position reads must not be freed."""
        num_computed = self.allocation.num_computed_tokens
        return min(num_computed, len(self.allocation.token_ids) - 1) if self.may_repeat else num_computed

    def plan(self, step: int, num_tokens: int, *, samples: bool) -> None:
        """Record that the plan of `step` computes the next `num_tokens` positions of this sequence and, if `samples` is
        true, samples its next token."""
        self.planned_step = step
        self.allocation.compute(num_tokens)
        self._num_expected += samples

    def reported(self) -> None:
        """Record that the candidates for this beam's next token have arrived from the worker, so that no sample of this
        beam is in flight."""
        self._num_expected = len(self.allocation.token_ids)

    def append_token(self, token_id: int) -> None:
        """Append the token that the scheduler has chosen to the sequence. The row must be gated: the worker does not
        compute it further until the scheduler has chosen its next token."""
        self.allocation.token_ids.append(token_id)
        self._num_expected = len(self.allocation.token_ids)

    def repeat(self, num_samples: int) -> None:
        """Record that planned samples of this sequence will not arrive, because its grammar mask was not ready in time,
        or because a lease ended early.

        The position from which the first token was to be sampled will be computed again, if it has been computed.
        """
        self._num_expected -= num_samples
        self.allocation.compute_again(self._num_expected - 1)

    def rewind(self) -> None:
        """Ignore all results of this sequence that are still in flight, because the sequence is interrupted. Later, the
        position of its last known token is computed again."""
        self.drop()
        self.allocation.compute_again(len(self.allocation.token_ids) - 1)

    def drop(self) -> None:
        """Ignore all tokens of this row that are still in flight. A row is the worker's state of one running
        sequence."""
        self.drops.num_drops += self.num_in_flight > 0
        self.is_dropped = True

    def vacate(self) -> None:
        """Record that this sequence no longer has a slot on the worker. Tokens that are still in flight are used when
        they arrive."""
        self.slot = -1

    def join_decoding(self, steps: StepCount) -> None:
        """Count one computed position and one sampled token for each step plan from now on. Plans then need no entry
        for this sequence."""
        self.last_step = steps.num_steps + self.sequence.max_num_tokens - self._num_expected
        self.allocation.join_decoding(steps)

    def set_due_step(self, block_step: int) -> int:
        """Set and return the number of the next step in which the scheduler must examine this decoding sequence.

        This is `block_step`, in which the sequence needs its next KV cache block, or the step that samples its last
        token if that step comes first.
        """
        self.due_step = min(block_step, self.last_step)
        return self.due_step

    def leave_decoding(self, steps: StepCount) -> None:
        """Stop counting one token for each step plan. From now on, `plan` must be called for each plan that computes
        this sequence."""
        self.planned_step, self._num_expected, self.due_step = steps.num_steps, self.num_expected_tokens, 0
        self.allocation.leave_decoding()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The state of a request's beam search: its current beams, and the changes of beams that the worker has not
    received yet.

    Each sequence of the request corresponds to one row (the worker's state of a running sequence). Beams may move
    between these sequences after each step.
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
    new_states: list[tuple[int, ...]] = field(default_factory=list)  # slot, first and second state of these targets
    num_tokens: int = 0  # tokens with which its beams have continued, in total

    def report(self, beam: Sequence, candidates: list[tuple[int, float]]) -> bool:
        """Store the candidates for the next token of one beam, as (token id, log-probability) pairs.

        Return True if all beams now have candidates. The caller can then call `select`.
        """
        self.candidates[beam] = candidates
        return len(self.candidates) == len(self.beams)

    def select(self) -> BeamStep:
        """Choose the beams of the next step from the candidates of all current beams. The result also says whether the
        search has ended."""
        states = [BeamState(beam.cumulative_logprob, beam.token_ids[beam.num_prompt_tokens :]) for beam in self.beams]
        step = self.search.advance(states, [self.candidates[beam] for beam in self.beams])
        self.candidates.clear()
        return step

    def forget_step(self) -> None:
        """Discard the candidates of the current step, and the changes of beams that the worker has not received yet."""
        self.candidates.clear()
        self.forget_changes()

    def forget_changes(self) -> None:
        """Discard the changes of beams (forks and appended tokens) from the last selection, for example after a plan
        has included them."""
        self.forks.clear()
        self.appended.clear()
        self.new_slots.clear()
        self.new_states.clear()
