"""Rows with a grammar on the bundled model: what they may give, whatever happens to them on the way."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from tokenizers import Tokenizer

from worker_service.config import WorkerConfig
from worker_service.engine import LoadedWorker
from worker_service.startup.loader import load_worker
from worker_service.step import (
    AddedGrammar,
    GrammarKind,
    GrammarReport,
    Pooling,
    ProtocolError,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
)

STORYTELLER = Path("models/storyteller")
TOKENIZER = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
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
)
BLOCKS_PER_ROW = 16
TIMEOUT_S = 20


class Driver:
    """Plans made by hand for a few rows: row i has slot i and its own blocks."""

    def __init__(self, worker: LoadedWorker) -> None:
        self.runner = worker.runner
        self.step = 0
        self.begin()

    def begin(self) -> None:
        """A new epoch, with the grammars ready."""
        self.step = 0
        reports: SimpleQueue[GrammarReport] = SimpleQueue()
        self.runner.reset(1, reports.put)
        self.run(added_grammars=GRAMMARS)
        assert {reports.get(timeout=TIMEOUT_S) for _ in GRAMMARS} == {GrammarReport(1, 1), GrammarReport(1, 2)}

    def run(self, **fields: object) -> StepResult:
        self.step += 1
        return self.runner.execute(StepPlan(1, self.step, **fields))  # type: ignore[attr-defined]

    def open(self, *openings: RowOpening) -> StepResult:
        """Open rows, compute all that they have, and sample."""
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
def driver(worker: LoadedWorker) -> Driver:
    return Driver(worker)


def outputs(driver: Driver, num_tokens: int, *openings: RowOpening) -> list[list[int]]:
    """The tokens of rows that are opened together, one list each."""
    results = [driver.open(*openings), *(driver.run() for _ in range(num_tokens - 1))]
    assert {result.statuses for result in results} == {()}
    return [list(tokens) for tokens in zip(*(result.token_ids for result in results), strict=True)]


def cut(tokens: list[int]) -> list[int]:
    """The tokens up to the first end token, behind which is nothing else."""
    end = tokens.index(END)
    assert set(tokens[end:]) == {END}
    return tokens[:end]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_row_with_a_schema_gives_an_object_of_it_and_then_its_end_again_and_again(
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
def test_a_row_that_is_opened_again_with_what_it_had_goes_on_as_if_nothing_had_been(
    driver: Driver, num_before: int
) -> None:
    (whole,) = outputs(driver, 80, opening(0, grammar_id=1))
    driver.begin()
    again = opening(2, grammar_id=1, output=whole[:num_before])
    assert outputs(driver, 80 - num_before, again) == [whole[num_before:]]


def test_a_fork_has_a_matcher_of_its_own(driver: Driver) -> None:
    """The copy samples nothing until it is given a token, which its source is not."""
    source = opening(0, grammar_id=2, sampling=SamplingParams())
    whole = outputs(driver, 10, source)[0]
    driver.begin()
    driver.open(source)
    for _ in range(4):
        driver.run()
    a = TOKENIZER.encode("a").ids[-1]
    blocks = tuple(range(60, 76))
    driver.run(
        work_slots=(0,),
        work_num_tokens=(0,),
        fork_source_slots=(0,),
        fork_target_slots=(5,),
        set_block_slots=(5,) * 16,
        set_block_indexes=tuple(range(16)),
        set_block_ids=blocks,
    )
    driver.run(
        released_slots=(0,), openings=(opening(0, grammar_id=2, output=[*whole[:5]], sampling=SamplingParams()),)
    )
    assert a < 1024
    rest = driver.run(work_slots=(0,), work_num_tokens=(len(PROMPT) + 5,)).token_ids
    assert list(rest) == whole[5:6]


def test_a_token_that_the_grammar_refuses_fails_its_row_alone_in_every_step(driver: Driver) -> None:
    bad = opening(1, grammar_id=2, output=TOKENIZER.encode("{").ids)
    first = driver.open(opening(0, grammar_id=1), bad, opening(2, grammar_id=0))
    results = [first, *(driver.run() for _ in range(3))]
    statuses = (RowStatus.OK, RowStatus.GRAMMAR_FAILED, RowStatus.OK)
    assert [result.statuses for result in results] == [statuses] * 4
    good = [list(tokens) for tokens in zip(*(result.token_ids for result in results), strict=True)]
    driver.begin()
    assert outputs(driver, 4, opening(0, grammar_id=1), opening(2, grammar_id=0)) == good


def test_a_row_opens_with_a_grammar_that_is_there_or_not_at_all(driver: Driver) -> None:
    for grammar_id, reason in ((3, "it was never added"), (1, "it was released before")):
        released = (1,) if grammar_id == 1 else ()
        with pytest.raises(ProtocolError, match=reason):
            driver.run(openings=(opening(0, grammar_id=grammar_id),), released_grammar_ids=released)
        driver.begin()
    embedding = opening(0, grammar_id=1, sampling=SamplingParams(pooling=Pooling.MEAN))
    with pytest.raises(ProtocolError, match="pooling and a grammar"):
        driver.run(openings=(embedding,))


def test_grammars_die_with_their_epoch(driver: Driver) -> None:
    driver.runner.reset(2)
    with pytest.raises(ProtocolError, match="it was never added"):
        driver.runner.execute(StepPlan(2, 1, openings=(replace(opening(0, grammar_id=1)),)))  # type: ignore[attr-defined]
