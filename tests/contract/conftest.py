import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from testing.scheduler_stack import make_checkpoint


def _is_of_this_test(record: logging.LogRecord) -> bool:
    """Not what the poller of grpcio 1.81 may say of the event loop of a test that has ended."""
    is_closed = record.exc_info is not None and str(record.exc_info[1]) == "Event loop is closed"
    return not (is_closed and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_is_of_this_test)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def special_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose tokenizer puts a special token before a prompt."""
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
    """A verb that runs in this process sets the root logger up for itself: no later test sees that."""
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
