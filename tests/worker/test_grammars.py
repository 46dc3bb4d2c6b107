"""The grammars of an epoch: prepared on a separate thread, and reported once to the session that added them."""

import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from tokenizers import Tokenizer

from pagewire.common.grammars import GrammarCompiler, Matcher, version
from pagewire.common.wire.messages import AddedGrammar, GrammarKind, GrammarReport, StepPlan, WorkerProtocolError
from testing.checkpoints.gguf_files import write_gguf
from worker_service import epoch_grammars
from worker_service.epoch_grammars import CompileThread, EpochGrammars
from worker_service.startup.grammar_tokenizer import GrammarStart

STORYTELLER = Path("models/storyteller")
TOKENIZER = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
A, TRUE = TOKENIZER.encode("a").ids, TOKENIZER.encode("true").ids
TIMEOUT_S = 20


class HeldCompiler:
    """A compiler that reports each start, and waits for the test if `is_held`."""

    def __init__(self) -> None:
        self.compiler = GrammarCompiler((STORYTELLER / "tokenizer.json").read_text(), 1024)
        self.is_held = False
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.may_go = threading.Semaphore(0)
        self.niceness: list[int] = []

    def compile(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.begun.put(text)
        if self.is_held:
            assert self.may_go.acquire(timeout=TIMEOUT_S)
        if text == "defect":
            raise ZeroDivisionError
        return self.compiler.compile(kind, text, end_token_ids)


class Epochs:
    """Grammars of successive epochs, and the reports about them."""

    def __init__(self) -> None:
        self.compiler = HeldCompiler()
        self.grammars = EpochGrammars(CompileThread(lambda: self.compiler.compile), 1024)
        self.reports: SimpleQueue[GrammarReport] = SimpleQueue()
        self.grammars.begin(1, self.reports.put)

    def report(self) -> GrammarReport:
        return self.reports.get(timeout=TIMEOUT_S)

    def ready(self, *added: AddedGrammar) -> None:
        """Add grammars and wait until they are prepared."""
        self.grammars.apply(StepPlan(1, 1, added_grammars=added))
        assert {self.report().error for _ in added} <= {""}


@pytest.fixture
def epochs() -> Iterator[Epochs]:
    epochs = Epochs()
    yield epochs
    epochs.compiler.may_go.release(100)
    epochs.grammars.close()


def regex(grammar_id: int, text: str = "a+", end_token_ids: tuple[int, ...] = (0,)) -> AddedGrammar:
    return AddedGrammar(grammar_id, GrammarKind.REGEX, text, end_token_ids)


def test_each_grammar_is_reported_once_and_gives_matchers_that_go_their_own_way(epochs: Epochs) -> None:
    epochs.grammars.apply(StepPlan(1, 1, added_grammars=(regex(1), regex(7, "("))))
    assert epochs.report() == GrammarReport(1, 1, "")
    failed = epochs.report()
    assert (failed.grammar_id, failed.epoch) == (7, 1)
    assert failed.error
    first, second = epochs.grammars.matcher(1), epochs.grammars.matcher(1)
    first.consume(A)
    first.consume([0])
    assert (first.end_token_id, second.end_token_id) == (0, None)
    with pytest.raises(WorkerProtocolError, match="grammar 7, but it cannot be used"):
        epochs.grammars.matcher(7)
    assert epochs.reports.empty()


def test_a_grammar_that_is_not_ready_opens_no_row_and_no_other_waits_for_it(epochs: Epochs) -> None:
    epochs.compiler.is_held = True
    epochs.grammars.add(regex(1))
    assert epochs.compiler.begun.get(timeout=TIMEOUT_S) == "a+"
    with pytest.raises(WorkerProtocolError, match="grammar 1, but it is not ready"):
        epochs.grammars.matcher(1)
    epochs.compiler.may_go.release()
    assert epochs.report() == GrammarReport(1, 1, "")
    assert epochs.grammars.matcher(1).end_token_id is None


def test_a_grammar_that_was_released_is_neither_prepared_nor_reported(epochs: Epochs) -> None:
    epochs.compiler.is_held = True
    for grammar_id, text in ((1, "a"), (2, "b"), (3, "c")):
        epochs.grammars.add(regex(grammar_id, text))
    assert epochs.compiler.begun.get(timeout=TIMEOUT_S) == "a"
    epochs.grammars.release(1)
    epochs.grammars.release(2)
    epochs.compiler.may_go.release(2)
    assert epochs.report() == GrammarReport(1, 3, "")
    assert epochs.compiler.begun.get_nowait() == "c"
    assert epochs.reports.empty()
    for grammar_id in (1, 2):
        with pytest.raises(WorkerProtocolError, match=f"grammar {grammar_id}, but it was released before"):
            epochs.grammars.matcher(grammar_id)


def test_reports_go_to_the_epoch_that_added_the_grammar_and_to_no_later_one(epochs: Epochs) -> None:
    epochs.compiler.is_held = True
    epochs.grammars.add(regex(1, "a"))
    assert epochs.compiler.begun.get(timeout=TIMEOUT_S) == "a"
    later: SimpleQueue[GrammarReport] = SimpleQueue()
    epochs.grammars.begin(2, later.put)
    epochs.grammars.add(regex(1, "b"))
    with pytest.raises(WorkerProtocolError, match="not ready"):
        epochs.grammars.matcher(1)
    epochs.compiler.may_go.release(2)
    assert later.get(timeout=TIMEOUT_S) == GrammarReport(2, 1, "")
    assert epochs.reports.empty()
    assert later.empty()


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        *((regex(grammar_id), f"grammar {grammar_id} is added after 5; ids rise, from 1") for grammar_id in range(6)),
        (regex(6, end_token_ids=()), "at least one"),
        (regex(6, end_token_ids=(4, 4)), "they must ascend"),
        (regex(6, end_token_ids=(4, 1024)), "below 1024"),
    ],
)
def test_what_may_not_be_added_is_a_protocol_error(epochs: Epochs, added: AddedGrammar, reason: str) -> None:
    epochs.ready(regex(1), regex(2), regex(5))
    epochs.grammars.release(2)
    with pytest.raises(WorkerProtocolError, match=reason):
        epochs.grammars.add(added)
    with pytest.raises(WorkerProtocolError, match="a row opens with grammar 6, but it was never added"):
        epochs.grammars.matcher(6)


def test_what_is_not_there_cannot_be_released(epochs: Epochs) -> None:
    epochs.ready(regex(1))
    with pytest.raises(WorkerProtocolError, match="grammar 2 is released, but it was never added"):
        epochs.grammars.release(2)
    # A plan releases grammars before it adds grammars.
    with pytest.raises(WorkerProtocolError, match="grammar 2 is released"):
        epochs.grammars.apply(StepPlan(1, 2, added_grammars=(regex(2),), released_grammar_ids=(2,)))
    epochs.grammars.release(1)
    with pytest.raises(WorkerProtocolError, match="grammar 1 is released, but it was released before"):
        epochs.grammars.release(1)


def test_a_defect_fails_the_one_grammar_and_the_thread_goes_on(
    epochs: Epochs, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        epochs.grammars.add(regex(1, "defect"))
        epochs.grammars.add(regex(2))
        assert epochs.report() == GrammarReport(1, 1, "the grammar cannot be prepared: ZeroDivisionError")
        assert epochs.report() == GrammarReport(1, 2, "")
    assert "grammar 1 of epoch 1 (regex, 6 characters) cannot be used" in caplog.text


def test_a_grammar_that_takes_long_is_told_of_in_the_log(
    epochs: Epochs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(epoch_grammars, "_LONG_S", math.inf)
    epochs.ready(regex(1))
    assert caplog.messages == []
    monkeypatch.setattr(epoch_grammars, "_LONG_S", 0)
    epochs.ready(regex(2))
    (said,) = caplog.messages
    assert said.startswith("grammar 2 of epoch 1 (regex, 2 characters) took ")


def test_the_thread_gives_way_to_those_that_compute(epochs: Epochs) -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    epochs.ready(regex(1))
    assert epochs.compiler.niceness == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_worker_without_a_tokenizer_takes_no_grammar() -> None:
    grammars = EpochGrammars(None, 1024)
    with pytest.raises(WorkerProtocolError, match="no tokenizer"):
        grammars.add(regex(1))
    grammars.close()


@pytest.mark.parametrize("is_gguf", [False, True])
def test_the_model_s_own_tokenizer_reads_grammars(tmp_path: Path, is_gguf: bool) -> None:
    model = write_gguf(tmp_path / "model.gguf", STORYTELLER, "Q4_0") if is_gguf else STORYTELLER
    grammars, found = GrammarStart(model, 1024).finish()
    assert found == version()
    reports: SimpleQueue[GrammarReport] = SimpleQueue()
    grammars.begin(1, reports.put)
    grammars.add(AddedGrammar(1, GrammarKind.JSON_SCHEMA, '{"type": "boolean"}', (0,)))
    assert reports.get(timeout=TIMEOUT_S) == GrammarReport(1, 1, "")
    matcher = grammars.matcher(1)
    matcher.consume([*TRUE, 0])
    assert matcher.end_token_id == 0
    grammars.close()


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(None, "tokenizer.json is missing"), ("{}", ""), ("what", ""), (b"\xff", "utf-8")]
)
def test_without_a_tokenizer_that_can_be_read_grammars_alone_are_refused(
    tmp_path: Path, tokenizer: str | bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_bytes(tokenizer if isinstance(tokenizer, bytes) else tokenizer.encode())
    with caplog.at_level(logging.INFO):
        grammars, found = GrammarStart(tmp_path, 1024).finish()
    assert found == ""
    (said,) = caplog.messages
    assert said.startswith("requests for structured output will be refused: ")
    assert reason in said
    with pytest.raises(WorkerProtocolError, match="no tokenizer"):
        grammars.add(regex(1))


def test_a_job_that_raises_is_logged_and_the_next_runs(caplog: pytest.LogCaptureFixture) -> None:
    thread = CompileThread(lambda: HeldCompiler().compile)
    done = threading.Event()

    def fail(_: object) -> None:
        raise RuntimeError("no job of a grammar raises")

    with caplog.at_level(logging.CRITICAL):
        thread.submit(fail)
        thread.submit(lambda _: done.set())
        assert done.wait(TIMEOUT_S)
    thread.stop()
    assert "no job of a grammar raises" in caplog.text
