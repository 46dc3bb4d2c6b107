"""The scheduler's own state of requests and sequences.

A request is a group of sequences: parallel samples, or the beams of a search. A group is admitted, preempted and
resumed as a whole; `lifecycle.py` alone says in which state it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagewire.common.wire.messages import Pooling
from scheduler_service.core.beam import BeamSearch, BeamState, BeamStep
from scheduler_service.core.cache import Cursor, Holding, StepCount
from scheduler_service.core.request import OutputMode, Request


class GroupState(Enum):
    """The state of a group: what it does, and where its blocks are."""

    WAITING = "waiting"  # nothing of it is on the worker
    PREPARING = "preparing"  # as before, and it cannot begin: the worker prepares its grammar
    RUNNING = "running"
    SWAPPING_OUT = "swapping_out"  # its blocks are on their way to the host
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"  # its blocks, or those of a prefix that it matched, are on their way to the device
    FINISHED = "finished"


# Which state may follow which, and what then has happened. `Lifecycle._enter` goes by it, and the picture in
# ARCHITECTURE.md is made of it.
TRANSITIONS = {
    (GroupState.WAITING, GroupState.PREPARING): "its grammar is not ready on this worker; no other waits for it",
    (GroupState.PREPARING, GroupState.WAITING): "its grammar is ready, or the worker is lost",
    (GroupState.WAITING, GroupState.RUNNING): "it begins, with nothing to load",
    (GroupState.WAITING, GroupState.SWAPPING_IN): "it begins with blocks that the host has",
    (GroupState.RUNNING, GroupState.SWAPPING_OUT): "it is preempted, and what it has computed is kept on the host",
    (GroupState.RUNNING, GroupState.SWAPPED): "the same, and the host has all of that already",
    (GroupState.SWAPPING_OUT, GroupState.SWAPPED): "its blocks are on the host",
    (GroupState.SWAPPED, GroupState.SWAPPING_IN): "it goes on",
    (GroupState.SWAPPING_IN, GroupState.RUNNING): "its blocks are on the device",
    **{
        (state, GroupState.WAITING): "what it has on the worker is lost"
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
    """How often samples on their way were dropped, of any row. While it stands still, all of them count."""

    num_drops: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A session that has requests, or blocks that may serve another one (`retention.py`)."""

    free_list: int
    tenant: str
    name: str  # empty: it was found by its prefix
    last_used_at: float
    has_returned: bool = False  # it has had more than one request
    num_blocks: int = 0  # that its last request had computed
    num_groups: int = 0  # that wait or run
    waiting: dict[SequenceGroup, None] = field(default_factory=dict)
    will_return: bool | None = None  # as its last request said
    retention_s: float = 0.0  # the same
    num_gaps: int = 0  # seconds between its requests that are in the mean
    mean_log_gap: float = 0.0


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request until its last sequence has ended."""

    request: Request
    arrival: int  # counts the requests
    order: tuple[Any, ...]  # by its policy, among those that run: lower is served first, and preempted last
    arrived_at: float
    waiting_order: tuple[Any, ...] = ()  # by its policy, among those of its tenant that wait: lower is next
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    state: GroupState = GroupState.WAITING
    beam: BeamGroup | None = None  # its search, if it is one
    # Slots that are its own, but hold no row: a beam search keeps all of its slots, a group that is being swapped in
    # those that it will need.
    reserved_slots: list[int] = field(default_factory=list)
    moved_step: int = 0  # what it waits for while swapping: the acknowledgement of this step's moves
    num_preemptions: int = 0
    # In turn when it was preempted, or lost its worker, and when it ran again.
    pauses: tuple[float, ...] = ()
    cursor: Cursor | None = None  # of its prompt, while it waits for the first time and its policy goes by that
    session: Session | None = None  # that it is part of, if its policy goes by sessions and the worker is there
    num_session_tokens: int = 0  # that the session had computed when it arrived
    session_age_s: float = 0.0  # since the session's last request had ended
    is_overdue: bool = False  # it waited as long as its policy lets a request wait
    num_waiting_sequences: int = 0  # what it counts for in the queue: constant while it is there
    uncharged_mask_tokens: float = 0.0  # below 1: of what its masks have taken, what its policy has not been told of
    # Crashes of the worker since a token of this request was last confirmed, with the request dispatched; and those of
    # them in which nothing else was.
    num_crashes: int = 0
    num_lone_crashes: int = 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end its outputs wherever they come: those of its grammar."""
        return () if self.request.grammar is None else self.request.grammar.end_token_ids

    @property
    def is_finished(self) -> bool:
        return self.state is GroupState.FINISHED

    @property
    def has_precedence(self) -> bool:
        """Whether it goes before those that have waited less and have never run."""
        return self.is_overdue or bool(self.pauses)

    @property
    def begins_anew(self) -> bool:
        """Whether one row must compute all of it, from its first position on: a mean is lost with its row, and nothing
        that is cached stands for a part of one."""
        return self.request.sampling.pooling is Pooling.MEAN

    @property
    def num_first_slots(self) -> int:
        """Slots without which it cannot begin: a search moves its beams between all its rows, samples open as they
        can."""
        return 1 if self.beam is None else self.request.num_rows

    @property
    def live_sequences(self) -> list[Sequence]:
        """The sequences that go on: samples that have not ended, or the beams of a search."""
        if self.beam is not None:
            return self.beam.beams
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def rows(self) -> list[Row]:
        """The rows that its sequences have, or had last."""
        return [sequence.row for sequence in self.sequences if sequence.row is not None]

    @property
    def open_rows(self) -> list[Row]:
        """Those of them that have a slot."""
        return [row for row in self.rows if row.slot >= 0]

    @property
    def planned_step(self) -> int:
        """The last plan that has any of its rows: before the result of it is here, no other row takes its place."""
        return max((row.planned_step for row in self.rows), default=0)

    @property
    def unopened_sequences(self) -> list[Sequence]:
        """The sequences that go on and have no slot yet."""
        return [sequence for sequence in self.live_sequences if sequence.open_row is None]

    @property
    def swapped_holdings(self) -> list[Holding]:
        """What it has on the host."""
        return [sequence.holding for sequence in self.live_sequences if sequence.holding.host_blocks]

    @property
    def is_bound(self) -> bool:
        """Whether it is lost with this scheduler: its client has had a part of its output, or comes for it later. Any
        other could as well begin again elsewhere."""
        if self.request.output_mode is OutputMode.STREAMED and self.beam is None:
            return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)
        return self.request.output_mode is OutputMode.DETACHED

    def pause(self, now: float) -> None:
        """Note that what it had on the worker is gone, or on its way to the host."""
        if len(self.pauses) % 2 == 0:
            self.pauses += (now,)

    def resume(self, now: float) -> None:
        """Note that it runs, for the first time or again."""
        if len(self.pauses) % 2:
            self.pauses += (now,)

    def dissolve(self) -> None:
        """Let go of its sequences, the last of which has ended: a group and its sequences no longer hold each other, so
        that both are freed when the last plan that knows them is, without a garbage collection."""
        for sequence in self.sequences:
            sequence.finish()
        self.sequences.clear()
        if self.beam is not None:
            self.beam.beams.clear()


@dataclass(slots=True, eq=False)
class Sequence:
    """A sample of a request, or a row of its beam search: its tokens, what it holds on a worker, and its row."""

    sequence_id: int
    group: SequenceGroup
    sample_index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output
    holding: Holding  # of what it has on the worker that is there
    stop_token_ids: frozenset[int]
    num_prompt_logprobs: int | None
    is_finished: bool = False  # once and for ever: by `finish`
    has_failed: bool = False  # a row of it had bad logits, and what it wrote was unpublished
    row: Row | None = None  # on the worker that is there, or the last that it had on that
    cumulative_logprob: float = 0.0  # of a beam
    num_cached_tokens: int = 0
    num_charged_tokens: int = 0  # of its tokens, those that the policy need not be told of: its prompt, to begin with
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
        """Whether it may begin with what is cached."""
        return not self.wants_prompt_logprobs and not self.group.begins_anew

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be computed for their log-probabilities, cached or not."""
        return self.num_prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1

    @property
    def open_row(self) -> Row | None:
        """Its row, if it has a slot."""
        return self.row if self.row is not None and self.row.slot >= 0 else None

    def take_slot(self, slot: int, drops: DropCount, *, is_gated: bool) -> Row:
        """Have a row. Nothing of one that it had before is on its way."""
        self.row = Row(self, self.holding, slot, drops, is_gated, len(self.token_ids))
        return self.row

    def finish(self) -> None:
        """End: nothing that any plan computes of it is told from now on."""
        self.is_finished = True
        if self.row is not None:
            self.row.drop()
        self.row = None

    def begin_epoch(self, holding: Holding) -> None:
        """Have nothing of a worker that is lost, but this of the one that is there."""
        self.holding, self.row = holding, None


@dataclass(slots=True, eq=False)
class Row:
    """What a sequence has on the worker from taking a slot to vacating it. What the plans under way compute of it still
    comes after that, unless it is dropped."""

    sequence: Sequence
    holding: Holding  # the sequence's own
    slot: int  # -1: it was vacated
    drops: DropCount  # of all rows
    is_gated: bool  # its next token is not known when it has sampled: it rests until it is told what it goes on with
    # Tokens known and in flight. A row that decodes, in every plan one token, is not visited: it has one more than are
    # computed.
    _num_expected: int
    is_dropped: bool = False  # once and for ever: nothing that a plan computes of it counts
    planned_step: int = 0  # the last plan that has it; while it decodes all have, from this one on
    due_step: int = 0  # the plan that must look at it, for a block or for its last token; 0: it does not decode
    last_step: int = 0  # the plan that samples its last token, if it decodes

    def __str__(self) -> str:
        marks = {
            "vacated": self.slot < 0,
            "gated": self.is_gated,
            "decodes": self.is_decoding,
            "dropped": self.is_dropped,
        }
        return (
            f"slot {self.slot} of sequence {self.sequence.sequence_id}: {self.holding.num_computed_tokens} of "
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
        return self.holding.num_computed_tokens + 1 if self.due_step else self._num_expected

    @property
    def num_in_flight(self) -> int:
        """Count the samples on their way that will count."""
        return 0 if self.is_dropped else self.num_expected_tokens - len(self.holding.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Count the positions to plan: computed chases known plus in flight, and stops where the length limit will end
        it."""
        if self.is_gated:
            return len(self.holding.token_ids) - self.holding.num_computed_tokens
        num_expected = self.num_expected_tokens
        return num_expected - self.holding.num_computed_tokens if num_expected < self.sequence.max_num_tokens else 0

    @property
    def num_settled_tokens(self) -> int:
        """Count the positions that are planned, whose tokens are known, and that are not computed again: the block of
        such a one is still its own."""
        return min(self.holding.num_computed_tokens, len(self.holding.token_ids) - self.may_repeat)

    @property
    def may_repeat(self) -> bool:
        """Whether its last known token may be computed again: by a gated row that was preempted, and by one with a
        grammar that was late. What that reads and writes must still be its own."""
        return self.is_gated or self.sequence.group.request.grammar is not None

    @property
    def next_position(self) -> int:
        """The first position that may be computed from now on."""
        num_computed = self.holding.num_computed_tokens
        return min(num_computed, len(self.holding.token_ids) - 1) if self.may_repeat else num_computed

    def plan(self, step: int, num_tokens: int, *, samples: bool) -> None:
        """Count what the plan of `step` computes: this many more positions, and a sample or none."""
        self.planned_step = step
        self.holding.compute(num_tokens)
        self._num_expected += samples

    def reported(self) -> None:
        """The candidates of a beam are here: no sample is on its way."""
        self._num_expected = len(self.holding.token_ids)

    def go_on_with(self, token_id: int) -> None:
        """Give a gated row its next token."""
        self.holding.token_ids.append(token_id)
        self._num_expected = len(self.holding.token_ids)

    def repeat(self) -> None:
        """A sample that was on its way does not come: the position before it is computed again, unless all are."""
        self._num_expected -= 1
        self.holding.compute_again(self._num_expected - 1)

    def rewind(self) -> None:
        """Forget what it is about to report: the next row computes its last token again."""
        self.drop()
        self.holding.compute_again(len(self.holding.token_ids) - 1)

    def drop(self) -> None:
        """Let no sample that is on its way count."""
        self.drops.num_drops += self.num_in_flight > 0
        self.is_dropped = True

    def vacate(self) -> None:
        """Give the slot up. Samples on their way still count."""
        self.slot = -1

    def join_decoding(self, steps: StepCount) -> None:
        """Count one token and one sample for every plan from the next one on."""
        self.last_step = steps.num_steps + self.sequence.max_num_tokens - self._num_expected
        self.holding.join_decoding(steps)

    def due_by(self, block_step: int) -> int:
        """It decodes, and needs its next block in this plan. Returns the one that must look at it."""
        self.due_step = min(block_step, self.last_step)
        return self.due_step

    def leave_decoding(self, steps: StepCount) -> None:
        """Count what plans compute of it one by one again."""
        self.planned_step, self._num_expected, self.due_step = steps.num_steps, self.num_expected_tokens, 0
        self.holding.leave_decoding()


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The search of a group while it runs, whose sequences are rows that beams move between, not beams."""

    search: BeamSearch
    output_ids: list[int]  # sequence ids that the hypotheses will have, best first
    beams: list[Sequence]  # rows of the live ones, best first
    # Candidates of the beams whose row has reported since the last selection: (token id, logprob), best first.
    candidates: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    # What the selection changed and no plan has told the worker yet.
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    unborn_slots: set[int] = field(default_factory=set)  # targets of these forks that have no row yet
    num_tokens: int = 0  # that its beams have gone on with, all together

    def report(self, beam: Sequence, candidates: list[tuple[int, float]]) -> bool:
        """A beam's row has computed its candidates. Whether all have by now, so that `select` can choose among them."""
        self.candidates[beam] = candidates
        return len(self.candidates) == len(self.beams)

    def select(self) -> BeamStep:
        """Choose the beams that go on, among the candidates of all."""
        states = [BeamState(beam.cumulative_logprob, beam.token_ids[beam.num_prompt_tokens :]) for beam in self.beams]
        step = self.search.advance(states, [self.candidates[beam] for beam in self.beams])
        self.candidates.clear()
        return step

    def forget_step(self) -> None:
        """Forget the candidates that were reported since the last selection, and the changes of rows that no plan has
        named yet."""
        self.candidates.clear()
        self.forget_changes()

    def forget_changes(self) -> None:
        """Forget what the selection changed."""
        self.forks.clear()
        self.appended.clear()
        self.unborn_slots.clear()
