"""A worker in plain Python that obeys plans to the letter, for tests of the core.

Its KV cache is content-addressed: each position holds a digest of the whole prefix read through the block table, and
the next token is a function of that digest. Any wrong, stale or early block changes the output, so `reference` is an
oracle for everything the scheduler does.
"""

from dataclasses import dataclass, field

import xxhash

from scheduler_service.core.plan import Logprobs, PromptLogprobs, RowOpening, RowStatus, StepPlan, StepResult


def digest(previous: int, token_id: int) -> int:
    return xxhash.xxh3_64_intdigest(previous.to_bytes(8, "little") + token_id.to_bytes(4, "little"))


def next_token(prefix: int, seed: int, sample_index: int, vocab_size: int) -> int:
    """The last id of the vocabulary is never generated: tests put it into prompts as poison."""
    return xxhash.xxh3_64_intdigest(f"{prefix} {seed} {sample_index}".encode()) % (vocab_size - 1)


def reference(prompt: tuple[int, ...], num_tokens: int, *, seed: int, sample_index: int, vocab_size: int) -> list[int]:
    """The tokens that an undisturbed run generates."""
    prefix = 0
    for token_id in prompt:
        prefix = digest(prefix, token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(next_token(prefix, seed, sample_index, vocab_size))
        prefix = digest(prefix, output[-1])
    return output


@dataclass(slots=True)
class Row:
    opening: RowOpening
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    work: int = 0


@dataclass(slots=True)
class SimulatedWorker:
    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    rows: dict[int, Row] = field(default_factory=dict)
    last_step: int = 0
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    poisoned: frozenset[int] = frozenset()  # a row whose input holds one of these tokens has no good logits

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        self._patch(plan)
        working = [(slot, row) for slot, row in sorted(self.rows.items()) if row.work]
        assert 0 < sum(row.work for _, row in working) <= self.max_num_batched_tokens
        for _, row in self._producers_first(working):
            self._write(row)
        statuses, token_ids, chosen, ranks, prompt_logprobs = [], [], [], [], []
        for slot, row in working:
            self._report_prompt(slot, row, prompt_logprobs)
            row.num_computed += row.work
            if row.num_computed < len(row.token_ids):
                continue
            prefix = self._read(row, row.num_computed - 1)
            row.work = 1
            if prefix == -1:
                statuses.append(RowStatus.NAN_LOGITS)
                row.token_ids.append(0)
                continue
            opening = row.opening
            token_id = next_token(prefix, opening.seed, opening.sample_index, self.vocab_size)
            statuses.append(RowStatus.OK)
            token_ids.append(token_id)
            row.token_ids.append(token_id)
            if opening.sampling.num_logprobs is not None:
                chosen.append(-float(len(row.token_ids)))
                ranks.append(1)
        if all(status is RowStatus.OK for status in statuses):
            statuses = []
        logprobs = Logprobs(tuple(chosen), tuple(ranks))
        return StepResult(plan.epoch, plan.step, tuple(statuses), tuple(token_ids), logprobs, tuple(prompt_logprobs))

    def _patch(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self.rows[slot]
        for opening in plan.openings:
            assert opening.slot not in self.rows
            assert 0 <= opening.slot < self.max_num_seqs
            assert opening.num_computed_tokens < len(opening.token_ids)
            self.rows[opening.slot] = Row(
                opening, list(opening.token_ids), list(opening.block_ids), opening.num_computed_tokens
            )
        for slot, block in zip(plan.append_slots, plan.append_block_ids, strict=True):
            self.rows[slot].block_ids.append(block)
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            self.rows[slot].work = num_tokens
        for row in self.rows.values():
            assert all(1 <= block <= self.num_blocks for block in row.block_ids)
            assert row.num_computed + row.work <= len(row.token_ids)
            assert row.num_computed + row.work <= len(row.block_ids) * self.block_size

    def _producers_first(self, working: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
        """A real worker writes a layer's K and V of all rows before any attends; here rows go in the order that reads
        what is written: a row that starts at a position comes after all that write before it."""
        return sorted(working, key=lambda entry: entry[1].num_computed)

    def _write(self, row: Row) -> None:
        for position in range(row.num_computed, row.num_computed + row.work):
            prefix = self._read(row, position - 1) if position else 0
            token_id = row.token_ids[position]
            bad = prefix == -1 or token_id in self.poisoned
            key = (row.block_ids[position // self.block_size], position % self.block_size)
            self.kv[key] = -1 if bad else digest(prefix, token_id)

    def _read(self, row: Row, position: int) -> int:
        return self.kv.get((row.block_ids[position // self.block_size], position % self.block_size), 12345)

    def _report_prompt(self, slot: int, row: Row, reports: list[PromptLogprobs]) -> None:
        if row.opening.sampling.num_prompt_logprobs is None:
            return
        num = min(row.num_computed + row.work, row.opening.num_prompt_tokens - 1) - row.num_computed
        if num > 0:
            first = row.num_computed + 1
            chosen = tuple(-float(position) for position in range(first, first + num))
            reports.append(PromptLogprobs(slot, first, Logprobs(chosen, (1,) * num)))
