"""Rows with a grammar on the bundled model: the permitted tokens, under interruptions of every kind."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagewire.common.grammars import GrammarCompiler
from pagewire.common.wire.messages import (
    AddedGrammar,
    GrammarKind,
    GrammarReport,
    Pooling,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerProtocolError,
)
from tests.worker.late_queue import LateQueue
from worker_service.config import WorkerConfig
from worker_service.engine import LoadedWorker
from worker_service.rows import StepWatch, WorkingRows
from worker_service.runner import ModelRunner
from worker_service.startup.loader import load_worker

STORYTELLER = Path("models/storyteller")
TOKENIZER = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
COMPILER = GrammarCompiler((STORYTELLER / "tokenizer.json").read_text(), 1024)
PROMPT = TOKENIZER.encode("Once upon a time there was a fox who said: ").ids
END = json.loads((STORYTELLER / "config.json").read_text())["eos_token_id"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = (
    AddedGrammar(1, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), (END,)),
    AddedGrammar(2, GrammarKind.REGEX, "[a-z ]{40}", (END,)),
    # Ambiguous: after about 60 tokens it needs more time than a step may use.
    AddedGrammar(3, GrammarKind.GRAMMAR, 'start: s "b"\ns: "a" s "a" | "a" s | s "a" | "a"', (END,)),
    AddedGrammar(4, GrammarKind.GRAMMAR, 'start: "a" X\nX: /b/ & /c/', (END,)),
)
BLOCKS_PER_ROW = 16
TIMEOUT_S = 20


class Driver:
    """A driver of handmade plans for a few rows: row i has slot i and its own blocks."""

    def __init__(self, worker: LoadedWorker) -> None:
        assert isinstance(worker.runner, ModelRunner)
        self.runner = worker.runner
        self.computation: Any = worker.runner.computation
        self.masks = worker.runner.table.masks
        self.masks.waits_for_all = True  # tests must not depend on the machine's speed
        self.step = 0
        self.begin()

    def begin(self) -> None:
        """Begin a new epoch, with all grammars prepared."""
        self.step = 0
        reports: SimpleQueue[GrammarReport] = SimpleQueue()
        self.runner.reset(1, reports.put)
        self.run(added_grammars=GRAMMARS)
        assert {reports.get(timeout=TIMEOUT_S) for _ in GRAMMARS} == {
            GrammarReport(1, i) for i in range(1, len(GRAMMARS) + 1)
        }

    def run(self, **fields: Any) -> StepResult:
        self.step += 1
        return self.runner.execute(StepPlan(1, self.step, **fields))

    def open(self, *openings: RowOpening) -> StepResult:
        """Allocate rows, compute all their tokens, and sample."""
        return self.run(
            openings=openings,
            work_slots=tuple(opening.slot for opening in openings),
            work_num_tokens=tuple(len(opening.token_ids) for opening in openings),
        )


def opening(
    slot: int, *, grammar_id: int, output: Sequence[int] = (), sampling: SamplingParams | None = None, seed: int = 5
) -> RowOpening:
    blocks = tuple(range(1 + slot * BLOCKS_PER_ROW, 1 + (slot + 1) * BLOCKS_PER_ROW))
    sampling = sampling or SamplingParams(temperature=1.0)
    tokens = (*PROMPT, *output)
    return RowOpening(slot, slot, tokens, len(PROMPT), 0, blocks, sampling, seed, 0, grammar_id=grammar_id)


@pytest.fixture(scope="module")
def worker() -> Iterator[LoadedWorker]:
    worker = load_worker(WorkerConfig(model=str(STORYTELLER), device="cpu", num_device_blocks=100), "worker")
    yield worker
    worker.close()


@pytest.fixture
def driver(worker: LoadedWorker) -> Iterator[Driver]:
    driver = Driver(worker)
    queue = driver.masks.queue
    yield driver
    driver.masks.queue = queue


def late_outputs(driver: Driver, num_tokens: int, *openings: RowOpening) -> tuple[list[list[int]], int]:
    """Return the outputs, as `outputs` does, of rows that may be late, and the number of late results."""
    found: list[list[int]] = [[] for _ in openings]
    result, num_late = driver.open(*openings), 0
    while True:
        token_ids = iter(result.token_ids)
        for tokens, status in zip(found, result.statuses or (RowStatus.OK,) * len(found), strict=True):
            assert status in (RowStatus.OK, RowStatus.LATE)
            num_late += status is RowStatus.LATE
            if status is RowStatus.OK:
                tokens.append(next(token_ids))
        if min(map(len, found)) >= num_tokens:
            return [tokens[:num_tokens] for tokens in found], num_late
        result = driver.run()


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_late_give_the_same_later(driver: Driver, seed: int) -> None:
    """Late rows with penalties and log-probabilities give the same tokens later.

    Rows without a grammar run beside them and are never late.
    """
    print("seed", seed)
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, num_logprobs=2)
    rows = [
        opening(0, grammar_id=1, sampling=sampling, seed=seed),
        opening(1, grammar_id=0, seed=seed),
        opening(2, grammar_id=2, sampling=SamplingParams(temperature=0.0)),
        opening(3, grammar_id=1, seed=seed),
    ]
    driver.masks.queue = LateQueue(seed, rate=0.0)
    expected = outputs(driver, 25, *rows)
    driver.begin()
    driver.masks.queue, driver.masks.waits_for_all = LateQueue(seed, rate=0.6), False
    found, num_late = late_outputs(driver, 25, *rows)
    assert found == expected
    assert num_late > 20


def test_a_step_that_would_give_nothing_waits_for_a_mask(driver: Driver) -> None:
    driver.masks.queue, driver.masks.waits_for_all = LateQueue(1, rate=1.0), False
    rows = [opening(slot, grammar_id=1, seed=slot) for slot in range(3)]
    results = [driver.open(*rows), *(driver.run() for _ in range(5))]
    assert [sorted(status.name for status in result.statuses) for result in results] == [["LATE", "LATE", "OK"]] * 6
    assert [len(result.mask_us) for result in results] == [1] * 6, "each mask is told of once"
    free = driver.run(openings=(opening(4, grammar_id=0),), work_slots=(4,), work_num_tokens=(len(PROMPT),))
    assert [status.name for status in free.statuses] == ["LATE", "LATE", "LATE", "OK"]


def outputs(driver: Driver, num_tokens: int, *openings: RowOpening) -> list[list[int]]:
    """Return the tokens of rows that are allocated together, one list for each row."""
    results = [driver.open(*openings), *(driver.run() for _ in range(num_tokens - 1))]
    assert {result.statuses for result in results} == {()}
    return [list(tokens) for tokens in zip(*(result.token_ids for result in results), strict=True)]


def cut(tokens: list[int]) -> list[int]:
    """Return the tokens up to the first end token, after which only end tokens may follow."""
    end = tokens.index(END)
    assert set(tokens[end:]) == {END}
    return tokens[:end]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_row_with_schema_gives_an_object_and_then_only_end_tokens(
    driver: Driver, seed: int, temperature: float
) -> None:
    row = opening(0, grammar_id=1, sampling=SamplingParams(temperature=temperature), seed=seed)
    found = json.loads(TOKENIZER.decode(cut(outputs(driver, 80, row)[0])))
    assert set(found) == {"name", "age"}
    assert len(found["name"]) <= 12
    assert found["age"] <= 99


def test_rows_beside_rows_with_grammars_give_what_they_give_alone(driver: Driver) -> None:
    free = [opening(slot, grammar_id=0, seed=slot) for slot in (0, 2)]
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    bound = [opening(1, grammar_id=1), opening(3, grammar_id=2, sampling=sampling)]
    alone = outputs(driver, 30, *free)
    driver.begin()
    together = outputs(driver, 30, free[0], bound[0], free[1], bound[1])
    assert [together[0], together[2]] == alone
    driver.begin()
    assert outputs(driver, 30, *bound) == [together[1], together[3]]


@pytest.mark.parametrize("num_before", [1, 7, 20, 70])
def test_readded_row_continues_unchanged(driver: Driver, num_before: int) -> None:
    (whole,) = outputs(driver, 80, opening(0, grammar_id=1))
    driver.begin()
    again = opening(2, grammar_id=1, output=whole[:num_before])
    assert outputs(driver, 80 - num_before, again) == [whole[num_before:]]


def beams(*openings: RowOpening, step: StepResult) -> dict[int, tuple[int, ...]]:
    """Return the candidates of each slot, after checking that its grammar permits them."""
    counts, token_ids = step.candidates.counts, step.candidates.token_ids
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    found = {row.slot: token_ids[end - count : end] for row, end, count in zip(openings, ends, counts, strict=True)}
    for row in openings:
        for token_id in found[row.slot]:
            allowed(row.grammar_id, [*row.token_ids[len(PROMPT) :], token_id])
    return found


def allowed(grammar_id: int, output: Sequence[int]) -> None:
    """Raise GrammarError if the grammar does not permit the output."""
    grammar = GRAMMARS[grammar_id - 1]
    COMPILER.compile(grammar.kind.name.lower(), grammar.text, grammar.end_token_ids).consume(output)


def test_beams_choose_among_allowed_tokens_and_a_fork_goes_its_own_way(driver: Driver) -> None:
    """Each beam continues with another candidate.

    It then offers the same candidates as a row allocated with the same output.
    """
    sampling = SamplingParams(num_candidates=6)
    row = opening(0, grammar_id=1, sampling=sampling)
    candidates = beams(row, step=driver.open(row))[0]
    assert 1 <= len(candidates) <= 6
    first = opening(0, grammar_id=1, output=candidates[:1], sampling=sampling)
    candidates = beams(first, step=driver.run(**appended(first)))[0]
    assert len(candidates) > 1
    pair = [
        opening(slot, grammar_id=1, output=(*first.token_ids[len(PROMPT) :], candidates[i]), sampling=sampling)
        for i, slot in enumerate((0, 2))
    ]
    forked = driver.run(
        copy_source_blocks=pair[0].block_ids,
        copy_target_blocks=pair[1].block_ids,
        fork_source_slots=(0,),
        fork_target_slots=(2,),
        set_block_tables=(2,) * BLOCKS_PER_ROW,
        set_block_indexes=tuple(range(BLOCKS_PER_ROW)),
        set_block_ids=pair[1].block_ids,
        **appended(*pair),
    )
    found = beams(*pair, step=forked)
    driver.begin()
    assert beams(*pair, step=driver.open(*pair)) == found


def appended(*openings: RowOpening) -> dict[str, tuple[int, ...]]:
    """Return the plan's fields that append each row's last token and compute it."""
    slots = tuple(row.slot for row in openings)
    token_ids = tuple(row.token_ids[-1] for row in openings)
    return {
        "append_token_slots": slots,
        "append_token_ids": token_ids,
        "work_slots": slots,
        "work_num_tokens": (1,) * len(slots),
    }


def test_a_step_in_parts_gives_what_it_gives_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has rows with grammars, of which one fails, and a row without."""
    rows = [
        opening(0, grammar_id=1, sampling=SamplingParams(num_candidates=4)),
        opening(1, grammar_id=2, output=TOKENIZER.encode("{").ids),
        opening(2, grammar_id=0),
        opening(3, grammar_id=2, sampling=SamplingParams(temperature=0.0, num_logprobs=2)),
    ]
    whole = driver.open(*rows)
    assert whole.statuses == (RowStatus.OK, RowStatus.GRAMMAR_FAILED, RowStatus.OK, RowStatus.OK)
    driver.begin()
    compute = driver.computation._compute

    def compute_little(rows: WorkingRows, watch: StepWatch) -> Any:
        if rows.num_new_tokens.sum() > 20:
            raise MemoryError
        return compute(rows, watch)

    monkeypatch.setattr(driver.computation, "_compute", compute_little)
    parts = driver.open(*rows)
    assert (parts.statuses, parts.token_ids, parts.candidates.counts, parts.candidates.token_ids) == (
        whole.statuses,
        whole.token_ids,
        whole.candidates.counts,
        whole.candidates.token_ids,
    )
    assert parts.logprobs.top_token_ids == whole.logprobs.top_token_ids


def test_a_token_that_the_grammar_refuses_fails_its_row_alone_in_every_step(driver: Driver) -> None:
    bad = opening(1, grammar_id=2, output=TOKENIZER.encode("{").ids)
    first = driver.open(opening(0, grammar_id=1), bad, opening(2, grammar_id=0))
    results = [first, *(driver.run() for _ in range(3))]
    statuses = (RowStatus.OK, RowStatus.GRAMMAR_FAILED, RowStatus.OK)
    assert [result.statuses for result in results] == [statuses] * 4
    good = [list(tokens) for tokens in zip(*(result.token_ids for result in results), strict=True)]
    driver.begin()
    assert outputs(driver, 4, opening(0, grammar_id=1), opening(2, grammar_id=0)) == good


def test_where_no_token_can_follow_the_row_says_so(driver: Driver) -> None:
    first = driver.open(opening(0, grammar_id=1), opening(1, grammar_id=4))
    assert first.statuses == ()
    assert driver.run().statuses == driver.run().statuses == (RowStatus.OK, RowStatus.GRAMMAR_DEAD_END)


def test_a_grammar_that_takes_too_much_ends_its_row_alone(driver: Driver) -> None:
    """The row fails in the step in which the grammar exceeds the limit, and in every later step."""
    (a,) = TOKENIZER.encode("a").ids[-1:]
    num_before = 50
    sampling = SamplingParams(logit_bias_token_ids=(a,), logit_bias_values=(100.0,))
    bound = opening(1, grammar_id=3, output=[a] * num_before, sampling=sampling)
    others = opening(0, grammar_id=1), opening(2, grammar_id=0)
    results = [driver.open(others[0], bound, others[1]), *(driver.run() for _ in range(29))]
    found = [result.statuses[1] if result.statuses else RowStatus.OK for result in results]
    num_good = found.index(RowStatus.GRAMMAR_LIMIT)
    assert 0 < num_good < 30
    assert found[num_good:] == [RowStatus.GRAMMAR_LIMIT] * (30 - num_good)
    assert {result.token_ids[1] for result in results[:num_good]} == {a}
    driver.begin()
    good = [[result.token_ids[i] for result in results] for i in (0, -1)]  # a failed row gives no token
    assert outputs(driver, 30, *others) == good


def test_a_row_opens_with_a_grammar_that_is_there_or_not_at_all(driver: Driver) -> None:
    for grammar_id, reason in ((5, "it was never added"), (1, "it was released before")):
        released = (1,) if grammar_id == 1 else ()
        with pytest.raises(WorkerProtocolError, match=reason):
            driver.run(openings=(opening(0, grammar_id=grammar_id),), released_grammar_ids=released)
        driver.begin()
    embedding = opening(0, grammar_id=1, sampling=SamplingParams(pooling=Pooling.MEAN))
    with pytest.raises(WorkerProtocolError, match="pooling and a grammar"):
        driver.run(openings=(embedding,))


def test_grammars_die_with_their_epoch(driver: Driver) -> None:
    driver.runner.reset(2)
    with pytest.raises(WorkerProtocolError, match="it was never added"):
        driver.runner.execute(StepPlan(2, 1, openings=(opening(0, grammar_id=1),)))
