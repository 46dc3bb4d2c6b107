"""Grammars are checked once before their requests are queued: cached results, waiting requests, and fairness."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pagewire.common.grammars import version
from pagewire.common.grammars.trial import Trials
from pagewire.common.wire.messages import GrammarKind, WorkerCapacity
from scheduler_service.core.request import Grammar
from scheduler_service.serving import grammar_checks
from scheduler_service.serving.checkpoint.model_info import read_model_info
from scheduler_service.serving.grammar_checks import GrammarChecks
from scheduler_service.serving.refusal import RefusedError
from testing.checkpoints.gguf_files import write_gguf
from testing.scheduler_stack import make_checkpoint
from testing.sources import ROOT

END = 0  # the tokenizer's end token


@pytest.fixture(autouse=True)
def trials_are_shared() -> None:
    """Do not share trial processes: each test has its own."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "with_end", eos_token_id=END)


class Checked:
    """A GrammarChecks object and the list of its compilation results (True for a valid grammar)."""

    def __init__(self, path: Path) -> None:
        self.told: list[bool] = []
        self.checks = GrammarChecks(read_model_info(str(path)), self._tell)

    def _tell(self, seconds: float, is_good: bool) -> None:
        assert seconds > 0
        self.told.append(is_good)

    def assert_nothing_waits(self) -> None:
        assert not self.checks.num_waiting_bytes
        assert not self.checks._turns


@asynccontextmanager
async def checking(path: Path) -> AsyncIterator[Checked]:
    checked = Checked(path)
    await checked.checks.start()
    try:
        yield checked
    finally:
        checked.checks.close()


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, (END,))


def capacity(grammar_version: str) -> WorkerCapacity:
    return WorkerCapacity("w", b"", 300, 256, 4, 400, 1, 64, 64, "cpu", "float32", "", grammar_version=grammar_version)


async def test_a_grammar_is_compiled_once(model_path: Path) -> None:
    async with checking(model_path) as checked:
        for _ in range(3):
            await checked.checks.check(regex("[a-z]+"), "t")
            with pytest.raises(RefusedError, match="unclosed character class"):
                await checked.checks.check(regex("[a-z"), "u")
        assert checked.told == [True, False]
        assert checked.checks.num_verdicts == 2
        # The same text as another kind is a different grammar.
        with pytest.raises(RefusedError):
            await checked.checks.check(Grammar(GrammarKind.JSON_SCHEMA, "[a-z]+", (END,)), "t")
        assert checked.told == [True, False, False]


async def test_what_is_known_needs_no_thread(model_path: Path) -> None:
    async with checking(model_path) as checked:
        await checked.checks.check(regex("[a-z]+"), "t")
        checked.checks.close()  # the thread starts no further check
        check = checked.checks.check(regex("[a-z]+"), "t")
        with pytest.raises(StopIteration):  # the check ends without waiting
            check.send(None)


async def test_equal_grammars_that_come_at_once_are_compiled_once(model_path: Path) -> None:
    async with checking(model_path) as checked:
        await asyncio.gather(*(checked.checks.check(regex("[a-z]+"), "t") for _ in range(10)))
        assert checked.told == [True]


@pytest.mark.parametrize("num_tenants", [1, 3])
async def test_equal_waiting_grammars_share_one_check(
    model_path: Path, num_tenants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 clients send the same grammar, while the tenant's maximum number of other grammars is waiting."""
    monkeypatch.setattr(grammar_checks, "MAX_TENANT_WAITING", 5)
    async with checking(model_path) as checked:
        others = [asyncio.create_task(checked.checks.check(regex(f"g{number}"), "0")) for number in range(4)]
        same = [
            asyncio.create_task(checked.checks.check(regex("form"), str(number % num_tenants))) for number in range(300)
        ]
        await asyncio.sleep(0)  # each check has begun
        with pytest.raises(RefusedError, match="5 new grammars of this tenant"):
            await checked.checks.check(regex("another"), "0")
        for index in random.Random(num_tenants).sample(range(300), 200):
            same[index].cancel()
        results = await asyncio.gather(*others, *same, return_exceptions=True)
        assert sum(result is None for result in results) == 104
        assert len(checked.told) <= 4 + num_tenants
    checked.assert_nothing_waits()


async def test_equal_grammars_do_not_wait_for_others(model_path: Path) -> None:
    order: list[str] = []

    async def check(text: str) -> None:
        await checked.checks.check(regex(text), "t")
        order.append(text)

    async with checking(model_path) as checked:
        await asyncio.gather(*map(check, ["form", *(f"g{number}" for number in range(20)), *["form"] * 20]))
        # Their result arrives immediately, while the next grammar is being compiled.
        assert set(order[:21]) == {"form"}


async def test_the_oldest_verdicts_are_forgotten(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_MAX_VERDICTS", 3)
    async with checking(model_path) as checked:
        for text in ("a", "b", "c", "a", "d", "a", "b"):
            await checked.checks.check(regex(text), "t")
            assert checked.checks.num_verdicts <= 3
        assert len(checked.told) == 5, "b alone is compiled again"


async def test_tenants_are_served_in_turn(model_path: Path) -> None:
    order: list[str] = []

    async def check(text: str, tenant: str) -> None:
        await checked.checks.check(regex(text), tenant)
        order.append(text)

    async with checking(model_path) as checked:
        flood = [check(f"flood{number}", "flooding") for number in range(100)]
        others = [check(f"{tenant}{number}", tenant) for number in range(2) for tenant in ("x", "y")]
        await asyncio.gather(*flood, *others)
    assert set(order[:3]) == {"flood0", "x0", "y0"}
    assert set(order[3:6]) == {"flood1", "x1", "y1"}
    assert order[6:] == [f"flood{number}" for number in range(2, 100)]
    checked.assert_nothing_waits()


@pytest.mark.parametrize(("limit", "value", "most"), [("MAX_TENANT_WAITING", 5, 5), ("MAX_WAITING_BYTES", 40, 10)])
async def test_only_so_many_of_a_tenant_wait(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, most: int
) -> None:
    monkeypatch.setattr(grammar_checks, limit, value)
    async with checking(model_path) as checked:
        many = [asyncio.create_task(checked.checks.check(regex(f"g{number}"), "t")) for number in range(5)]
        await asyncio.sleep(0)  # each check has begun
        with pytest.raises(RefusedError, match=rf"\b{most}; try again later"):
            await checked.checks.check(regex("another"), "t")
        await checked.checks.check(regex("another"), "u")
        await asyncio.gather(*many)
        await checked.checks.check(regex("another"), "t")
    checked.assert_nothing_waits()


async def test_only_so_many_wait(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING_BYTES", 10)
    async with checking(model_path) as checked:
        many = [asyncio.create_task(checked.checks.check(regex(f"g{number}"), f"t{number}")) for number in range(5)]
        await asyncio.sleep(0)  # each check has begun
        with pytest.raises(RefusedError, match=r"\b10; try again later"):
            await checked.checks.check(regex("another"), "u")
        await asyncio.gather(*many)
        await checked.checks.check(regex("another"), "u")
    checked.assert_nothing_waits()


async def test_cancelled_checks_are_not_run(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    class CountingTrials(Trials):
        def run(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> str:
            compiled.append(text)
            return super().run(kind, text, end_token_ids)

    monkeypatch.setattr(grammar_checks, "Trials", CountingTrials)
    async with checking(model_path) as checked:
        tasks = [asyncio.create_task(checked.checks.check(regex(f"g{number}"), "t")) for number in range(20)]
        await asyncio.sleep(0)  # each check has begun
        for task in tasks[:-1]:  # the grammar on the thread, and the waiting ones
            task.cancel()
        await asyncio.wait(tasks[:-1])
        assert all(task.cancelled() for task in tasks[:-1])
        await tasks[-1]
        assert set(compiled) <= {"g0", "g19"}, "those that no request waits for are not compiled"
    checked.assert_nothing_waits()


async def test_errors_fit_into_a_status(model_path: Path) -> None:
    text = "€" * 5000 + "["
    async with checking(model_path) as checked:
        with pytest.raises(RefusedError) as refusal:
            await checked.checks.check(regex(text), "t")
    verdict = str(refusal.value).removeprefix("regex cannot be used: ")
    assert verdict.endswith("...")
    assert len(verdict.encode()) <= grammar_checks._MAX_ERROR_BYTES + 3


async def test_a_tokenizer_that_the_library_cannot_read(checkpoint: Path) -> None:
    """The end token of this checkpoint is not in its tokenizer.json."""
    async with checking(checkpoint) as checked:
        with pytest.raises(RefusedError, match=r"cannot read the checkpoint's tokenizer: .*299"):
            await checked.checks.check(regex("a"), "t")
        assert "299" in checked.checks.refusal
        assert not checked.told
        assert not checked.checks.num_verdicts


async def test_a_gguf_file_has_a_tokenizer_for_grammars(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "storyteller.gguf", ROOT / "models" / "storyteller", "Q8_0")
    end_token_ids = read_model_info(str(path)).grammar_end_token_ids
    assert end_token_ids
    async with checking(path) as checked:
        await checked.checks.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', end_token_ids), "t")
        assert checked.told == [True]


@pytest.mark.parametrize(("eos", "with_tokenizer", "reason"), [(0, False, "no tokenizer"), ([], True, "no end token")])
async def test_a_model_that_takes_no_grammars(tmp_path: Path, eos: object, with_tokenizer: bool, reason: str) -> None:
    path = make_checkpoint(tmp_path / "model", with_tokenizer=with_tokenizer, eos_token_id=eos)
    async with checking(path) as checked:
        assert reason in checked.checks.refusal
        checked.checks.worker_changed(capacity(""))
        assert reason in checked.checks.refusal


async def test_a_worker_must_read_grammars_alike(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with checking(model_path) as checked:
        checks = checked.checks
        await checks.check(regex("a"), "t")
        for theirs, reason in (
            ("0.0.1", rf"llguidance 0\.0\.1, but the scheduler has {version()}"),
            ("", "no grammars"),
        ):
            checks.worker_changed(capacity(theirs))
            checks.worker_changed(None)
            with pytest.raises(RefusedError, match=reason):
                await checks.check(regex("a"), "t")
            assert checks.refusal in caplog.text
        checks.worker_changed(capacity(version()))
        await checks.check(regex("a"), "t")


async def test_checks_give_way_to_others(model_path: Path) -> None:
    async with checking(model_path) as checked:
        await checked.checks.check(regex("a"), "t")
        assert checked.checks._trials is not None
        process = checked.checks._trials._process
        assert process is not None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)


async def test_a_large_grammar_is_read(model_path: Path) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(200)}}
    async with checking(model_path) as checked:
        await checked.checks.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), (END,)), "t")
        assert checked.told == [True]
