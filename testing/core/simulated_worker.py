"""A worker in plain Python that follows plans exactly, for tests of the core.

Its KV cache is content-addressed: the entry of a position is a digest of all tokens up to that position. Before a row
computes, the worker checks the positions that the row reads through its block table. They must contain exactly the
digests of the row's own tokens. The next token is a function of the last digest. So any wrong, stale or early block is
an error when it is read. `reference` and `candidates` are oracles for everything that the scheduler does.

The content of a state is the number of tokens that led to it, and the digest of these tokens. It is an error if a row
reads a state of other tokens.

Moves are done at once, or delayed until `finish_moves`. Any use of a moving block before its move is done is an error.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import gcd
from typing import Any

from pagewire.common.wire.messages import (
    FIRST_STATE_ID,
    AddedGrammar,
    Candidates,
    Logprobs,
    Pooling,
    PromptLogprobs,
    RowOpening,
    RowStatus,
    StepPlan,
    StepResult,
    WorkerCapacity,
)
from testing.core.simulated_states import RowStates, StateStep, Write, check_rows, writes_of
from testing.core.toy_grammar import ToyMatcher, constrained_candidates, constrained_token, is_readable, read

BAD = -1  # the digest of a position with invalid values; the hash of a tuple is never -1
NOISE = 12345  # the content of a block before it is written


def digest(previous: int, token_id: int) -> int:
    """Return the 64-bit digest of a position, from the digest of the position before.

    A tuple of integers has the same hash in every process.
    """
    return hash((previous, token_id))


def digest_all(token_ids: Iterable[int]) -> int:
    prefix = 0
    for token_id in token_ids:
        prefix = digest(prefix, token_id)
    return prefix


def next_token(prefix: int, seed: int, sample_index: int, vocab_size: int) -> int:
    """Return the token that an unconstrained row samples after a prefix.

    The last id of the vocabulary is never generated. Tests put it into prompts as poison.
    """
    return hash((prefix, seed, sample_index)) % (vocab_size - 1)


def candidates(prefix: int, num: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the `num` most likely (token id, logprob) pairs after a prefix.

    The tokens are distinct, and the logprobs fall strictly. Logprobs are multiples of 2**-30. So sums of thousands are
    exact in any order, and are almost never equal. The last id of the vocabulary comes last.
    """
    num_usual = vocab_size - 1
    noise = hash((prefix, 1))
    first, stride = noise % num_usual, 1 + (noise >> 20) % num_usual
    while gcd(stride, num_usual) != 1:
        stride += 1
    entries: list[tuple[int, float]] = []
    loss = 0
    for i in range(min(num, vocab_size)):
        loss += 1 + hash((prefix, 2, i)) % 2**30
        token_id = (first + i * stride) % num_usual if i < num_usual else num_usual
        entries.append((token_id, -loss / 2**30))
    return entries


def embedding(pooled: Sequence[int], last: int, pooling: Pooling) -> bytes:
    """Return an embedding of eight bytes.

    It depends on the last digest or, for a mean, on all digests that a row has computed and on their number.
    """
    value = last if pooling is Pooling.LAST else hash(tuple(pooled))
    return value.to_bytes(8, "little", signed=True)


def reference_embedding(prompt: Iterable[int], pooling: Pooling) -> bytes:
    """Return the embedding of a run without disturbances."""
    digests = list(accumulate(prompt, digest, initial=0))[1:]
    return embedding(digests, digests[-1], pooling)


def reference(prompt: Iterable[int], num_tokens: int, *, seed: int, sample_index: int, vocab_size: int) -> list[int]:
    """Return the tokens that a run without disturbances generates."""
    prefix = digest_all(prompt)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(prefix, seed, sample_index, vocab_size))
        prefix = digest(prefix, output[-1])
    return output


def _of_group(digests: list[int], group: int) -> list[int]:
    """Return what a block of a layer group contains for these digests, so that no group reads another group's block."""
    return [value if value == BAD else value ^ group for value in digests]


@dataclass(slots=True)
class Row:
    opening: RowOpening
    token_ids: list[int]
    tables: list[list[int]]  # the block table of each layer group
    num_computed: int
    work: int = 0
    digests: list[int] = field(default_factory=list)  # digests of the first token_ids, as far as needed
    pooled: list[int] = field(default_factory=list)  # digests of the positions that this row has computed
    matcher: ToyMatcher | None = None
    states: RowStates = field(default_factory=RowStates)

    @property
    def pooling(self) -> Pooling:
        return self.opening.sampling.pooling

    def fork(self) -> "Row":
        return replace(
            self,
            token_ids=self.token_ids.copy(),
            tables=[table.copy() for table in self.tables],
            digests=self.digests.copy(),
            matcher=self.matcher and self.matcher.copy(),
            states=replace(self.states),
            work=0,
        )


@dataclass(frozen=True, slots=True)
class Move:
    step: int
    is_out: bool  # from the device to the host
    source: int
    target: int


@dataclass(slots=True)
class SimulatedWorker:
    """A worker that checks every plan, and computes digests instead of K and V."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0
    windows: tuple[int, ...] = (0,)  # of each layer group: tokens that a query may read, including itself; 0: all
    is_bidirectional: bool = False  # tokens also read later ones, so that a step computes all tokens of a row
    rows: dict[int, Row] = field(default_factory=dict)
    last_step: int = 0
    # Digests by device block. State i is block FIRST_STATE_ID + i, and contains a number of tokens and their digest.
    kv: dict[int, list[int]] = field(default_factory=dict)
    host_kv: dict[int, list[int]] = field(default_factory=dict)
    poisoned: frozenset[int] = frozenset()  # a row whose input contains one of these tokens has invalid logits
    # Sequences whose next sampling row fails although its input is valid, with the status. Its logits and its written
    # values are invalid.
    bad_sequences: Mapping[int, RowStatus] = field(default_factory=dict)
    pending: deque[Move] = field(default_factory=deque)
    gates_grammars: bool = False
    # Returns whether a row's grammar mask is late, from the row's number of tokens and the step.
    is_late: Callable[[int, int], bool] = lambda num_tokens, step: False
    reads_grammars: bool = True  # grammars of `toy_grammar`; False: grammars do not constrain rows
    grammars: dict[int, AddedGrammar] = field(default_factory=dict)
    ready_grammars: set[int] = field(default_factory=set)
    last_grammar_id: int = 0
    num_states: int = 0  # 0: the model has no states
    num_host_states: int = 0
    # The steps and states of saves that rows did not reach, because they were late.
    ignored_saves: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, capacity: WorkerCapacity, **options: Any) -> "SimulatedWorker":
        """Return a new worker with this capacity. `options` are further fields."""
        return cls(
            capacity.num_device_blocks,
            capacity.block_size,
            capacity.vocab_size,
            capacity.max_num_seqs,
            capacity.max_num_batched_tokens,
            capacity.num_host_blocks,
            capacity.windows,
            capacity.is_bidirectional,
            gates_grammars=capacity.gates_grammars,
            num_states=capacity.num_device_states,
            num_host_states=capacity.num_host_states,
            **options,
        )

    @property
    def last_moved_step(self) -> int:
        return self.pending[0].step - 1 if self.pending else self.last_step

    def finish_moves(self, num: int) -> int:
        """Do the first `num` delayed moves.

        Returns the last step up to which all moves are done.
        """
        for _ in range(num):
            move = self.pending.popleft()
            source, target = (self.kv, self.host_kv) if move.is_out else (self.host_kv, self.kv)
            assert move.source in source, f"{move} reads a block that was never written"
            target[move.target] = source[move.source].copy()
        return self.last_moved_step

    def execute(self, plan: StepPlan, apply_moves: bool = True) -> StepResult:
        """Carry out a plan, and return its result. If `apply_moves` is false, the moves wait for `finish_moves`."""
        assert plan.step > self.last_step  # the session checks the order
        self.last_step = plan.step
        for slot in plan.released_slots:
            del self.rows[slot]
        if plan.released_grammar_ids or plan.added_grammars:
            self._exchange_grammars(plan)
        if plan.swap_out_device_blocks or plan.swap_in_host_blocks:
            self._move(plan)
        if apply_moves:
            self.finish_moves(len(self.pending))
        if plan.copy_source_blocks:
            self._copy(plan)
        for opening in plan.openings:
            self._open(opening)
        if plan.fork_target_slots or plan.set_state_slots or plan.append_token_slots:
            self._patch_beams(plan)
        self._patch(plan)
        working = [(slot, row) for slot, row in sorted(self.rows.items()) if row.work]
        writes = self._plan_states(plan, working)
        num_tokens = sum([row.work for _, row in working])
        assert num_tokens <= self.max_num_batched_tokens
        has_moves = bool(plan.swap_out_host_blocks or plan.swap_in_host_blocks)
        has_work = num_tokens or has_moves or plan.openings or plan.added_grammars
        assert has_work or (plan.ends_lease and plan.released_slots), "a plan does nothing"
        self._compute(working, writes)
        return self._answer(plan, working)

    # Grammars

    def _exchange_grammars(self, plan: StepPlan) -> None:
        for grammar_id in plan.released_grammar_ids:
            assert all(row.opening.grammar_id != grammar_id for row in self.rows.values()), (
                "a row's grammar is released"
            )
            del self.grammars[grammar_id]
            self.ready_grammars.discard(grammar_id)
        for added in plan.added_grammars:
            assert added.grammar_id > self.last_grammar_id, "the number of a grammar is given twice"
            self.last_grammar_id = added.grammar_id
            self.grammars[added.grammar_id] = added

    def prepare(self, grammar_id: int) -> str | None:
        """Prepare a grammar that was added.

        Returns an empty string, or the reason why the grammar cannot be read. Returns None if the grammar was released
        in the meantime.
        """
        added = self.grammars.get(grammar_id)
        if added is None:
            return None
        if not is_readable(added.text):
            return "a toy that cannot be read"
        self.ready_grammars.add(grammar_id)
        return ""

    # Moves and copies

    def _move(self, plan: StepPlan) -> None:
        outs = zip(plan.swap_out_device_blocks, plan.swap_out_host_blocks, strict=True)
        ins = zip(plan.swap_in_host_blocks, plan.swap_in_device_blocks, strict=True)
        moves = [Move(plan.step, True, *ends) for ends in outs] + [Move(plan.step, False, *ends) for ends in ins]
        for move in moves:
            device, host = (move.source, move.target) if move.is_out else (move.target, move.source)
            assert self._exists(device, self.num_blocks, self.num_states), f"{move}: no such device block"
            assert self._exists(host, self.num_host_blocks, self.num_host_states), f"{move}: no such host block"
            assert (device > FIRST_STATE_ID) == (host > FIRST_STATE_ID), (
                f"{move}: one end is a block, the other a state"
            )
            for other in self.pending:
                # Two moves may have the same source. No other block may be part of two moves.
                same_way = other.is_out == move.is_out
                touched = other.target if same_way else other.source
                read = other.source if same_way else other.target
                assert move.target != touched, f"S3: {move} writes what {other} writes or reads"
                assert same_way or move.source != read, f"S4: {move} reads what {other} has yet to write"
            self.pending.append(move)

    @staticmethod
    def _exists(block: int, num_blocks: int, num_states: int) -> bool:
        return 1 <= block <= num_blocks or FIRST_STATE_ID < block <= FIRST_STATE_ID + num_states

    def _copy(self, plan: StepPlan) -> None:
        pairs = list(zip(plan.copy_source_blocks, plan.copy_target_blocks, strict=True))
        contents = []
        for source, target in pairs:
            assert 1 <= source <= self.num_blocks
            assert 1 <= target <= self.num_blocks
            assert source in self.kv, f"block {source} is copied before it was written"
            self._assert_readable(source)
            self._assert_writable(target)
            contents.append(self.kv[source].copy())
        assert len({target for _, target in pairs}) == len(pairs), "two copies have one target"
        for (_, target), content in zip(pairs, contents, strict=True):
            self.kv[target] = content

    def _assert_readable(self, block: int) -> None:
        for move in self.pending:
            assert move.is_out or move.target != block, f"S4: block {block} is read before {move}"

    def _assert_writable(self, block: int) -> None:
        for move in self.pending:
            assert block != (move.source if move.is_out else move.target), f"S3: block {block} is written before {move}"

    # Rows

    def _patch_beams(self, plan: StepPlan) -> None:
        sources = [self.rows[slot].fork() for slot in plan.fork_source_slots]
        assert all(row.pooling is Pooling.NONE for row in sources), "a row with pooling is forked"
        for slot, row in zip(plan.fork_target_slots, sources, strict=True):
            assert 0 <= slot < self.max_num_seqs
            self.rows[slot] = row
        assert len(set(plan.fork_target_slots)) == len(plan.fork_target_slots), "two forks have one target"
        own_states = zip(plan.set_state_firsts, plan.set_state_seconds, strict=True)
        for slot, own in zip(plan.set_state_slots, own_states, strict=True):
            assert slot in plan.fork_target_slots, f"slot {slot} gets other states, and is not forked"
            self.rows[slot].states.own = own
        for slot, token_id in zip(plan.append_token_slots, plan.append_token_ids, strict=True):
            assert 0 <= token_id < self.vocab_size
            row = self.rows[slot]
            row.token_ids.append(token_id)
            if row.matcher is not None:
                row.matcher.consume((token_id,))
        assert len(set(plan.append_token_slots)) == len(plan.append_token_slots), "a row gets two tokens"

    def _patch(self, plan: StepPlan) -> None:
        for number, block in zip(plan.append_tables, plan.append_block_ids, strict=True):
            assert 1 <= block <= self.num_blocks
            self._table(number).append(block)
        for number, index, block in zip(plan.set_block_tables, plan.set_block_indexes, plan.set_block_ids, strict=True):
            assert 1 <= block <= self.num_blocks
            table = self._table(number)
            assert 0 <= index < len(table)
            table[index] = block
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            self.rows[slot].work = num_tokens
        assert len(set(plan.work_slots)) == len(plan.work_slots), "a row is patched twice"

    def _table(self, number: int) -> list[int]:
        group, slot = divmod(number, self.max_num_seqs)
        return self.rows[slot].tables[group]

    def _open(self, opening: RowOpening) -> None:
        assert opening.slot not in self.rows
        assert 0 <= opening.slot < self.max_num_seqs
        assert 1 <= opening.num_prompt_tokens <= len(opening.token_ids)
        assert 0 <= opening.num_computed_tokens < len(opening.token_ids)
        assert all(0 <= block <= self.num_blocks for block in opening.block_ids)
        tables = [list(table) for table in opening.block_tables]
        assert len(tables) == len(self.windows), "a row does not have one table for each layer group"
        states = RowStates(opening.read_state, opening.own_states)
        assert opening.read_state or not opening.num_computed_tokens or not self.num_states, (
            f"sequence {opening.sequence_id} has computed {opening.num_computed_tokens} tokens, and reads state 0"
        )
        row = Row(opening, list(opening.token_ids), tables, opening.num_computed_tokens, states=states)
        if opening.grammar_id and self.reads_grammars:
            assert opening.grammar_id in self.ready_grammars, "a row opens with a grammar that is not ready"
            added = self.grammars[opening.grammar_id]
            row.matcher = read(added.text, added.end_token_ids, self.vocab_size)
            row.matcher.consume(opening.token_ids[opening.num_prompt_tokens :])
        assert row.pooling is not Pooling.MEAN or not row.num_computed, "a mean does not begin anew"
        self.rows[opening.slot] = row

    # States

    def _plan_states(self, plan: StepPlan, working: list[tuple[int, Row]]) -> dict[int, list[Write]]:
        """Return the states that the rows write, by slot. Asserts that no other row reads or writes them."""
        rows = [row.states for row in self.rows.values()]
        if not self.num_states:
            assert not plan.save_states, "a save, but the model has no states"
            assert not any(row.own or row.read for row in rows), "a row has states, but the model has none"
            return {}
        check_rows(rows, self.num_states)
        steps = [
            StateStep(slot, row.states, row.num_computed, row.num_computed + row.work, bool(row.opening.grammar_id))
            for slot, row in working
        ]
        writes = writes_of(plan, steps, rows, self.ignored_saves)
        written = {*plan.save_states, *(state for pairs in writes.values() for _, state in pairs)}
        assert all(1 <= state <= self.num_states for state in written), f"no such state: {sorted(written)}"
        for state in written:
            self._assert_writable(FIRST_STATE_ID + state)
        for step in steps:
            self._assert_readable(FIRST_STATE_ID + step.states.read)
        return writes

    def _read_state(self, row: Row) -> None:
        """Check the state that a row reads: it must be the state after the row's computed tokens."""
        start, state = row.num_computed, row.states.read
        reader = f"sequence {row.opening.sequence_id} has computed {start} tokens, and reads state {state}"
        content = self.kv.get(FIRST_STATE_ID + state) if state else [0, 0]
        assert content is not None, f"{reader}, which was never written"
        position, found = content
        assert position == start, f"{reader}, which is after {position} tokens"
        expected = row.digests[start - 1] if start else 0
        if found == BAD:
            row.digests[start:] = [BAD] * (len(row.digests) - start)
        assert BAD in (found, expected) or found == expected, f"{reader}, which is of other tokens"

    def _write_states(self, row: Row, writes: list[Write]) -> None:
        for position, state in writes:
            if position == row.num_computed and row.states.read:
                content = self.kv[FIRST_STATE_ID + row.states.read].copy()
            else:
                content = [position, row.digests[position - 1] if position else 0]
            self.kv[FIRST_STATE_ID + state] = content
        row.states.advance()

    # The forward pass

    def _compute(self, working: list[tuple[int, Row]], writes: dict[int, list[Write]]) -> None:
        """Compute the rows in an order in which every read finds written values.

        A real worker writes a layer's K and V of all rows before any row attends. Here a row that starts at a position
        comes after all rows that write earlier positions.
        """
        written: set[int] = set()
        for slot, row in sorted(working, key=lambda pair: pair[1].num_computed):
            end = row.num_computed + row.work
            assert end <= len(row.token_ids), "a row computes beyond its tokens"
            is_whole = not row.num_computed and end == len(row.token_ids)
            assert is_whole or not self.is_bidirectional, "a row of a bidirectional model is computed in parts"
            assert end <= min(map(len, row.tables)) * self.block_size, "a row computes beyond its blocks"
            self._digest(row, end)
            for group in range(len(self.windows)):
                self._read(row, group)
            if self.num_states:
                self._read_state(row)
            if end == len(row.token_ids) and row.opening.sequence_id in self.bad_sequences:
                row.digests[row.num_computed :] = [BAD] * row.work
            for group in range(len(self.windows)):
                self._write(row, group, end, written)
            if self.num_states:
                self._write_states(row, writes[slot])
            if row.pooling is not Pooling.NONE:
                row.pooled += row.digests[row.num_computed : end]

    def _digest(self, row: Row, end: int) -> None:
        digests = row.digests
        prefix = digests[-1] if digests else 0
        for token_id in row.token_ids[len(digests) : end]:
            prefix = BAD if prefix == BAD or token_id in self.poisoned else digest(prefix, token_id)
            digests.append(prefix)

    def _read(self, row: Row, group: int) -> None:
        """Check the values of a layer group that the row's queries read: all computed positions, or the window of the
        first query."""
        size, start, window = self.block_size, row.num_computed, self.windows[group]
        first = max(0, start - window + 1) if window else 0
        while first < start:
            index = first // size
            block, last = row.tables[group][index], min(start, (index + 1) * size)
            assert block, f"sequence {row.opening.sequence_id} reads the hole at index {index} of its table"
            if self.pending:
                self._assert_readable(block)
            content = self.kv.get(block, ())[first - index * size : last - index * size]
            if row.digests[first] == BAD:
                break  # its values are invalid already, so the content does not matter
            if BAD in content:  # it reads invalid values of other rows, so its own become invalid
                bad = first + content.index(BAD)
                row.digests[bad:] = [BAD] * (len(row.digests) - bad)
            assert content == _of_group(row.digests[first:last], group), (
                f"sequence {row.opening.sequence_id} reads what is not its own: positions {first} to {last} of its "
                f"{start} computed, in block {block} of layer group {group}"
            )
            first = last

    def _write(self, row: Row, group: int, end: int, written: set[int]) -> None:
        size, position = self.block_size, row.num_computed
        while position < end:
            index = position // size
            block, last = row.tables[group][index], min(end, (index + 1) * size)
            assert block, f"sequence {row.opening.sequence_id} writes to the hole at index {index} of its table"
            assert block not in written, f"S12: two rows write to block {block}"
            written.add(block)
            if self.pending:
                self._assert_writable(block)
            content = self.kv.get(block)
            if content is None:
                content = self.kv[block] = [NOISE] * size
            content[position - index * size : last - index * size] = _of_group(row.digests[position:last], group)
            position = last

    # Results

    def _answer(self, plan: StepPlan, working: list[tuple[int, Row]]) -> StepResult:
        statuses: list[RowStatus] = []
        token_ids: list[int] = []
        chosen: list[float] = []
        beams: list[tuple[int, float]] = []
        counts: list[int] = []
        embeddings: list[bytes] = []
        prompt_logprobs: list[PromptLogprobs] = []
        mask_slots: list[int] = []
        for slot, row in working:
            opening = row.opening
            if opening.sampling.num_prompt_logprobs is not None:
                self._report_prompt(slot, row, prompt_logprobs)
            row.num_computed += row.work
            if row.num_computed < len(row.token_ids):
                continue
            prefix = row.digests[row.num_computed - 1]
            matcher = row.matcher
            status = self._status_of(row, prefix, plan.step)
            statuses.append(status)
            if status is RowStatus.LATE:
                self._go_back(row)
                row.work = int(opening.sampling.num_candidates is None and not self.gates_grammars)
                continue
            if matcher is not None:
                mask_slots.append(slot)
            is_good = status is RowStatus.OK
            if opening.sampling.num_candidates is not None:
                row.work = 0
                if is_good:
                    entries = self._candidates(row, prefix, opening.sampling.num_candidates)
                    beams.extend(entries)
                    counts.append(len(entries))
                continue
            if row.pooling is not Pooling.NONE:
                row.work = 0
                if is_good:
                    embeddings.append(embedding(row.pooled, prefix, row.pooling))
                continue
            row.work = 0 if matcher is not None and self.gates_grammars else 1
            if not is_good:
                row.token_ids.append(0)
                continue
            token_ids.append(self._next_token(row, matcher, prefix))
            row.token_ids.append(token_ids[-1])
            if opening.sampling.num_logprobs is not None:
                chosen.append(-float(len(row.token_ids)))
        return StepResult(
            plan.epoch,
            plan.step,
            () if set(statuses) <= {RowStatus.OK} else tuple(statuses),
            tuple(token_ids),
            Logprobs(tuple(chosen), (1,) * len(chosen)),
            Candidates(tuple(token_id for token_id, _ in beams), tuple(logprob for _, logprob in beams), tuple(counts)),
            tuple(prompt_logprobs),
            last_moved_step=self.last_moved_step,
            embeddings=tuple(embeddings),
            mask_slots=tuple(mask_slots),
            mask_us=tuple(100 * (1 + slot % 7) for slot in mask_slots),
        )

    def _go_back(self, row: Row) -> None:
        """Let a late row compute its last position again."""
        row.num_computed -= 1
        if self.num_states:
            row.states.go_back()

    def _status_of(self, row: Row, prefix: int, step: int) -> RowStatus:
        """Return the status of a row that has computed all its tokens. `prefix` is the digest of these tokens."""
        if prefix == BAD:
            return self.bad_sequences.get(row.opening.sequence_id, RowStatus.NAN_LOGITS)
        if row.matcher is None:
            return RowStatus.OK
        if row.matcher.status is not RowStatus.OK:
            return row.matcher.status
        return RowStatus.LATE if self.is_late(len(row.token_ids), step) else RowStatus.OK

    def _next_token(self, row: Row, matcher: ToyMatcher | None, prefix: int) -> int:
        opening = row.opening
        if matcher is None or row.matcher is None:
            return next_token(prefix, opening.seed, opening.sample_index, self.vocab_size)
        token_id = constrained_token(matcher, opening.sampling, prefix, opening.seed, opening.sample_index)
        row.matcher.consume((token_id,))
        return token_id

    def _candidates(self, row: Row, prefix: int, num: int) -> list[tuple[int, float]]:
        if row.matcher is None:
            return candidates(prefix, num, self.vocab_size)
        entries = candidates(prefix, self.vocab_size, self.vocab_size)
        return constrained_candidates(row.matcher, row.opening.sampling, entries, num)

    def _report_prompt(self, slot: int, row: Row, reports: list[PromptLogprobs]) -> None:
        num = min(row.num_computed + row.work, row.opening.num_prompt_tokens - 1) - row.num_computed
        if num > 0:
            first = row.num_computed + 1
            chosen = tuple(-float(position) for position in range(first, first + num))
            reports.append(PromptLogprobs(slot, first, Logprobs(chosen, (1,) * num)))
