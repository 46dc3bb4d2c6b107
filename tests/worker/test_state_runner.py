"""The runner on models with states: the same bits for any chunks, company, saves, forks, late rows and moves."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from shutil import copy
from typing import Any

import pytest
import torch

from pagewire.common.wire.messages import (
    FIRST_STATE_ID,
    AddedGrammar,
    GrammarKind,
    GrammarReport,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
)
from pagewire.network.source import load_config
from testing.checkpoints.families import make_checkpoint
from testing.kernels.compiler import skip_without_compiler
from testing.seeds import seeded
from tests.worker.late_queue import LateQueue
from tests.worker.runners import load
from worker_service.engine import LoadedWorker
from worker_service.epoch_grammars import EpochGrammars
from worker_service.startup.device_memory import StepSize
from worker_service.startup.memory_profile import largest_step
from worker_service.startup.warm_up import warm_up

STORYTELLER = Path("models/storyteller")
VOCAB_SIZE = 1024
WATCHED = SamplingParams(temperature=0.8, num_logprobs=0)
BEAM = SamplingParams(num_candidates=4)
PROMPT = [seeded(5).randrange(VOCAB_SIZE) for _ in range(41)]
NUM_STEPS = 8  # steps of a test, of which the first computes the last token of the prompt
BLOCKS_PER_ROW = 8


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=7, vocab_size=VOCAB_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(STORYTELLER / name, path / name)
    return path


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[LoadedWorker]:
    skip_without_compiler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEWIRE_CPU_KERNELS", "require")
        worker = load(checkpoint, num_host_blocks=40)
    yield worker
    worker.close()


@pytest.fixture
def plain_worker(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedWorker]:
    """A worker without the C kernels. Its products depend on the number of rows, to the last bits."""
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", "off")
    worker = load(checkpoint)
    yield worker
    worker.close()


def test_a_worker_reports_its_states(checkpoint: Path, worker: LoadedWorker) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert worker.ready.num_state_layers == sum(kind != "full_attention" for kind in config["layer_types"])
    assert worker.ready.state_bytes == 4 * load_config(checkpoint).state_size > 0
    cache = worker.runner._cache
    assert worker.ready.num_device_states == len(cache.states) - 1 >= 9
    assert worker.ready.num_host_states >= 4
    assert [group.num_layers for group in worker.ready.layer_groups] == [config["layer_types"].count("full_attention")]


def test_steps_before_the_first_epoch_have_states(worker: LoadedWorker) -> None:
    limits = worker.runner.table.limits
    plan, counts = largest_step(StepSize(64, 4), limits.max_model_len, limits.block_size, has_states=True)
    assert counts == (4, 1)
    worker.runner.reset(1)
    assert worker.runner.execute(plan).statuses == ()
    worker.runner.reset(2)
    told: list[str] = []
    warm_up(worker.runner, EpochGrammars(None, VOCAB_SIZE), told.append)
    assert any("candidates" in line for line in told)


class Driver:
    """A driver of handmade plans. All blocks and states contain NaN at first."""

    def __init__(self, worker: LoadedWorker) -> None:
        self.worker, self.runner = worker, worker.runner
        self.step = 0
        self.reports: SimpleQueue[GrammarReport] = SimpleQueue()
        self.runner.reset(1, self.reports.put)
        self.cache = self.runner._cache
        self.cache.storage[1:] = float("nan")
        self.cache.states[1:] = float("nan")

    def run(self, **columns: Any) -> StepResult:
        self.step += 1
        result = self.runner.execute(StepPlan(1, self.step, **columns))
        assert not self.cache.states[0].any()
        return result

    def follow(self, num_steps: int, **columns: Any) -> list[tuple[int, float]]:
        """Run steps in which the row in the highest slot samples. Return its tokens and their log-probabilities."""
        found = []
        for step in range(num_steps):
            result = self.run(**columns if step == 0 else {})
            assert result.statuses == ()
            found.append((result.token_ids[-1], result.logprobs.chosen[-1]))
        return found


def opening(slot: int, own: tuple[int, ...], num_computed: int = 0, read: int = 0, **fields: Any) -> RowOpening:
    blocks = tuple(range(1 + slot * BLOCKS_PER_ROW, 1 + (slot + 1) * BLOCKS_PER_ROW))
    row = RowOpening(slot, slot, tuple(PROMPT), len(PROMPT), num_computed, blocks, WATCHED, 3, 0)
    return replace(row, read_state=read, own_states=own, **fields)


def work(*entries: tuple[int, int]) -> dict[str, Any]:
    return {"work_slots": tuple(slot for slot, _ in entries), "work_num_tokens": tuple(num for _, num in entries)}


def alone(worker: LoadedWorker, num_steps: int = NUM_STEPS) -> list[tuple[int, float]]:
    """Return the tokens of a row that computes its prompt in one pass."""
    return Driver(worker).follow(num_steps, openings=(opening(0, (1,)),), **work((0, len(PROMPT))))


@pytest.mark.parametrize("own", [(2,), (2, 3)])
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_chunks_and_company_change_no_bit(worker: LoadedWorker, own: tuple[int, ...], chunk: int) -> None:
    assert in_chunks(worker, own, chunk) == alone(worker)


def test_chunks_in_plain_torch(plain_worker: LoadedWorker) -> None:
    expected = alone(plain_worker)
    for own, chunk in (((2,), 7), ((2, 3), 1)):
        found = in_chunks(plain_worker, own, chunk)
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)


def in_chunks(worker: LoadedWorker, own: tuple[int, ...], chunk: int) -> list[tuple[int, float]]:
    """Return the tokens of a row that computes its prompt in chunks, beside another row."""
    driver = Driver(worker)
    others = [seeded(6).randrange(VOCAB_SIZE) for _ in range(60)]
    other = opening(0, (1,), token_ids=tuple(others), num_prompt_tokens=60)
    driver.run(openings=(other, opening(1, own)), **work((0, 30), (1, chunk)))
    num_computed = chunk
    while num_computed + chunk < len(PROMPT):
        driver.run(**work((0, 1)))
        num_computed += chunk
    return driver.follow(NUM_STEPS, **work((1, len(PROMPT) - num_computed)))


@pytest.mark.parametrize("position", [16, 32, 40])
@pytest.mark.parametrize("own", [(5,), (5, 6)])
def test_a_row_continues_from_a_saved_state(worker: LoadedWorker, own: tuple[int, ...], position: int) -> None:
    expected = alone(worker)
    driver = Driver(worker)
    saves = {"save_slots": (0, 0), "save_positions": (position, 20), "save_states": (7, 8)}
    first = driver.follow(1, openings=(opening(0, own),), **work((0, len(PROMPT))), **saves)
    blocks = tuple(range(1, 1 + position // 16))
    blocks += tuple(range(1 + BLOCKS_PER_ROW, 1 + 2 * BLOCKS_PER_ROW - len(blocks)))
    if position % 16:  # samples fork within a block, which is copied
        driver.run(
            copy_source_blocks=(1 + position // 16,), copy_target_blocks=(blocks[position // 16],), **work((0, 0))
        )
    shared = opening(1, (3,), position, 7, block_ids=blocks)
    assert first == expected[:1]
    assert driver.follow(NUM_STEPS, openings=(shared,), **work((1, len(PROMPT) - position))) == expected


@pytest.mark.parametrize("own", [(5,), (5, 6)])
def test_a_decoding_row_saves_its_state_when_it_begins_a_block(worker: LoadedWorker, own: tuple[int, ...]) -> None:
    expected = alone(worker, 12)
    driver = Driver(worker)
    tokens = driver.follow(7, openings=(opening(0, own),), **work((0, len(PROMPT))))
    tokens += driver.follow(1, save_slots=(0,), save_positions=(48 - 1,), save_states=(8,))
    tokens += driver.follow(1, save_slots=(0,), save_positions=(48,), save_states=(9,))
    tokens += driver.follow(3)
    assert tokens == expected
    known = (*PROMPT, *(token for token, _ in tokens[:9]))
    blocks = (1, 2, 3, 20, 21)
    back = opening(1, own, 48, 9, block_ids=blocks, token_ids=known)
    assert driver.follow(3, released_slots=(0,), openings=(back,), **work((1, len(known) - 48))) == tokens[9:]


def test_a_row_that_is_moved_to_the_host_continues(worker: LoadedWorker) -> None:
    expected = alone(worker)
    driver = Driver(worker)
    tokens = driver.follow(3, openings=(opening(0, (4,)),), **work((0, len(PROMPT))))
    out = {
        "swap_out_device_blocks": (1, 2, 3, FIRST_STATE_ID + 4),
        "swap_out_host_blocks": (7, 8, 9, FIRST_STATE_ID + 2),
    }
    driver.run(released_slots=(0,), **out)
    driver.cache.storage[1:] = float("nan")
    driver.cache.states[1:] = float("nan")
    back = {
        "swap_in_host_blocks": (FIRST_STATE_ID + 2, 9, 7, 8),
        "swap_in_device_blocks": (FIRST_STATE_ID + 1, 13, 11, 12),
    }
    known = (*PROMPT, *(token for token, _ in tokens))
    row = opening(1, (1,), len(known) - 1, 1, block_ids=(11, 12, 13, 14), token_ids=known)
    tokens += driver.follow(NUM_STEPS - 3, openings=(row,), **work((1, 1)), **back)
    assert tokens == expected


def test_beams_continue_from_the_state_of_their_source(worker: LoadedWorker) -> None:
    """The candidates of each beam equal those of a row that computes all tokens of the beam in one pass."""
    driver = Driver(worker)
    rng = random.Random(8)
    beams = {0: list(PROMPT)}
    own = {0: (1, 2)}
    driver.run(openings=(opening(0, own[0], sampling=BEAM),), **work((0, len(PROMPT))))
    free = [3, 4, 5, 6, 7, 8, 9]
    found = {}
    for step in range(6):
        forks: dict[str, Any] = {}
        if step in (0, 2):  # slot 1 becomes a copy of slot 0, or the other way around
            source, target = (0, 1) if step == 0 else (1, 0)
            own[target] = (free.pop(), free.pop())
            beams[target] = list(beams[source])
            tail = len(beams[source]) // 16
            from_block, to_block = (1 + slot * BLOCKS_PER_ROW + tail for slot in (source, target))
            blocks = [1 + source * BLOCKS_PER_ROW + index for index in range(tail)] if step == 0 else [1, 2, 3][:tail]
            indexes = tuple(range(BLOCKS_PER_ROW))
            rest = range(to_block, to_block + BLOCKS_PER_ROW - tail)
            forks = {
                "fork_source_slots": (source,),
                "fork_target_slots": (target,),
                "set_state_slots": (target,),
                "set_state_firsts": (own[target][0],),
                "set_state_seconds": (own[target][1],),
                "copy_source_blocks": (from_block,),
                "copy_target_blocks": (to_block,),
                "set_block_tables": (target,) * BLOCKS_PER_ROW,
                "set_block_indexes": indexes,
                "set_block_ids": (*blocks, *rest),
            }
        tokens = {slot: rng.randrange(VOCAB_SIZE) for slot in beams}
        for slot, token in tokens.items():
            beams[slot].append(token)
        appended = {"append_token_slots": tuple(tokens), "append_token_ids": tuple(tokens.values())}
        result = driver.run(**forks, **appended, **work(*((slot, 1) for slot in beams)))
        for i, slot in enumerate(sorted(beams)):
            logprobs = result.candidates.logprobs[4 * i : 4 * i + 4]
            found[tuple(beams[slot])] = (result.candidates.token_ids[4 * i : 4 * i + 4], logprobs)
    for known, candidates in found.items():
        row = opening(0, (1, 2), sampling=BEAM, token_ids=known, num_prompt_tokens=len(known))
        expected = Driver(worker).run(openings=(row,), **work((0, len(known)))).candidates
        assert candidates == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_late_rows_give_the_same_later(worker: LoadedWorker, seed: int) -> None:
    print("seed", seed)
    grammar = AddedGrammar(1, GrammarKind.REGEX, "[a-z ]{40}", (0,))
    expected: list[list[tuple[int, float]]] = []
    for rate in (0.0, 0.6):
        driver = Driver(worker)
        driver.run(added_grammars=(grammar,))
        assert driver.reports.get(timeout=20) == GrammarReport(1, 1)
        masks = driver.runner.table.masks
        queue, masks.queue, masks.waits_for_all = masks.queue, LateQueue(seed, rate), False
        rows = (
            opening(0, (1, 2), grammar_id=1),
            opening(1, (3,)),
            opening(2, (5, 4), grammar_id=1, seed=9, token_ids=tuple(PROMPT[:30]), num_prompt_tokens=30),
        )
        found: list[list[tuple[int, float]]] = [[], [], []]
        num_late = 0
        columns: dict[str, Any] = {"openings": rows, **work((0, len(PROMPT)), (1, len(PROMPT)), (2, 30))}
        while min(map(len, found)) < 10:
            result = driver.run(**columns)
            columns = {}
            samples = iter(zip(result.token_ids, result.logprobs.chosen, strict=True))
            for outputs, status in zip(found, result.statuses or [RowStatus.OK] * 3, strict=True):
                if status is RowStatus.OK:
                    outputs.append(next(samples))
                num_late += status is RowStatus.LATE
        masks.queue = queue
        assert (num_late > 0) == (rate > 0)
        found = [outputs[:10] for outputs in found]
        expected = expected or found
        assert found == expected


def failing(driver: Driver, monkeypatch: pytest.MonkeyPatch, max_num_tokens: int) -> list[int]:
    """Let steps of more tokens fail for lack of memory. Return a list that gets the sizes of the other steps."""
    model, sizes = driver.runner.computation._model, []
    forward = model.forward_logits

    def forward_logits(token_ids: torch.Tensor, *others: Any) -> Any:
        if len(token_ids) > max_num_tokens:
            raise MemoryError
        sizes.append(len(token_ids))
        return forward(token_ids, *others)

    monkeypatch.setattr(model, "forward_logits", forward_logits)
    return sizes


@pytest.mark.parametrize("own", [(2,), (2, 3)])
def test_parts_of_a_step_change_no_bit(
    worker: LoadedWorker, own: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(worker)
    driver = Driver(worker)
    sizes = failing(driver, monkeypatch, 8)
    saves = {"save_slots": (1,), "save_positions": (16,), "save_states": (9,)}
    rows = (opening(0, (1,)), opening(1, own))
    assert driver.follow(NUM_STEPS, openings=rows, **work((0, 41), (1, 41)), **saves) == expected
    assert sum(sizes) == 2 * (len(PROMPT) + NUM_STEPS - 1)
    assert max(sizes) <= 8
    shared = opening(2, (4,), 16, 9, block_ids=(1 + BLOCKS_PER_ROW, *range(30, 37)))
    monkeypatch.undo()
    assert driver.follow(NUM_STEPS, openings=(shared,), **work((0, 0), (1, 0), (2, 25))) == expected


def test_a_state_that_was_not_computed_yields_no_token(worker: LoadedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(worker)
    sizes = failing(driver, monkeypatch, 0)
    saves = {"save_slots": (0,), "save_positions": (0,), "save_states": (9,)}
    driver.cache.states[9] = 1
    result = driver.run(openings=(opening(0, (1,)),), **work((0, 41)), **saves)
    assert (result.statuses, sizes) == ((RowStatus.OUT_OF_MEMORY,), [])
    monkeypatch.undo()
    driver.cache.storage[1:] = 0
    assert driver.run(openings=(opening(1, (2,), 16, 9),), **work((1, 25))).statuses[1] is RowStatus.NAN_LOGITS


def test_a_step_that_fails_after_it_has_overwritten_states_is_not_repeated(
    worker: LoadedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(worker)
    driver.follow(2, openings=(opening(0, (1,)), opening(1, (2, 3))), **work((0, 41), (1, 41)))

    def put_tokens(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(driver.runner.table, "put_tokens", put_tokens)
    with pytest.raises(RuntimeError, match="after it had overwritten states"):
        driver.run()
    monkeypatch.undo()
    assert in_chunks(worker, (2,), 7) == alone(worker)


def test_plain_torch_may_fail_after_it_has_overwritten_states(
    plain_worker: LoadedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation fails after others have written states. Rows that have not overwritten theirs are repeated."""
    driver = Driver(plain_worker)
    model = driver.runner.computation._model
    failures = [MemoryError(), MemoryError()]
    convolve = model.operations.convolve

    def fail_at_times(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        y = convolve(x, *arguments, **options)
        if failures and len(x) > 1:
            raise failures.pop()
        return y

    monkeypatch.setattr(model.operations, "convolve", fail_at_times)
    found = driver.follow(2, openings=(opening(0, (1,)),), **work((0, 41)))
    failures.append(MemoryError())
    with pytest.raises(RuntimeError, match="after it had overwritten states"):
        driver.run(openings=(opening(1, (2, 3)),), **work((1, 41)))
    monkeypatch.undo()
    assert [token for token, _ in found] == [token for token, _ in alone(plain_worker, 2)]
