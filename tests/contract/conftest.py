import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from pagewire.common.grammars import GrammarError
from pagewire.common.grammars.trial import Trials
from scheduler_service.api.grpc import scheduler_servicer
from scheduler_service.serving import grammar_checks
from testing.scheduler_stack import make_checkpoint
from testing.serving.tenants import write_tenants


def _is_of_this_test(record: logging.LogRecord) -> bool:
    """Return False for a late error that the poller of grpcio 1.81 logs about an event loop of an earlier test."""
    is_closed = record.exc_info is not None and str(record.exc_info[1]) == "Event loop is closed"
    return not (is_closed and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_is_of_this_test)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    write_tenants(tmp_path / "tenants.yaml")
    return tmp_path / "tenants.yaml"


@pytest.fixture(scope="module")
def special_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer puts a special token in front of each prompt."""
    folder = make_checkpoint(tmp_path_factory.mktemp("special"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = ("<end>", tokenizer.token_to_id("<end>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<end>", "eos_token": {"content": "<end>"}, "pad_token": None, "model_max_length": 9}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    """Restore the root logger after each test, because a command that runs in this process configures it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers.copy()
    yield
    for handler in root.handlers.copy():
        if handler not in handlers:
            root.removeHandler(handler)
    for handler in handlers:
        if handler not in root.handlers:
            root.addHandler(handler)
    root.setLevel(level)


class _Shared:
    """A grammar trial process that several services share.

    The process outlives each service. The services' threads use it one at a time.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials, self._lock = trials, threading.Lock()

    def run(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> str:
        with self._lock:
            return self._trials.run(kind, text, end_token_ids)

    def close(self) -> None:
        """Do nothing: the next service uses the process."""


@pytest.fixture(scope="session")
def _shared_trials() -> Iterator[Callable[..., _Shared]]:
    started: list[Trials] = []

    @functools.cache
    def start(*tokenizer: object) -> _Shared | GrammarError:
        try:
            started.append(Trials(*tokenizer))
        except GrammarError as error:
            return error
        return _Shared(started[-1])

    def share(*tokenizer: object) -> _Shared:
        found = start(*tokenizer)
        if isinstance(found, GrammarError):
            raise found
        return found

    yield share
    for trials in started:
        trials.close()


@pytest.fixture(autouse=True)
def trials_are_shared(_shared_trials: Callable[..., _Shared], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all services in this process share one grammar trial process for each tokenizer.

    Starting a process for each service would take longer than most tests. A test file about the trial process itself
    overrides this fixture with an empty one.
    """
    monkeypatch.setattr(grammar_checks, "Trials", _shared_trials)


@pytest.fixture
def open_attachments(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The Attach RPCs that the scheduler is serving."""
    found: list[object] = []
    write_deltas = scheduler_servicer.write_deltas

    async def counted(active: object, *rest: Any) -> None:
        found.append(active)
        try:
            await write_deltas(active, *rest)
        finally:
            found.remove(active)

    monkeypatch.setattr(scheduler_servicer, "write_deltas", counted)
    return found
