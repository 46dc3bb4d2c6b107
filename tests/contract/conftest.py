import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.scheduler_stack import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


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
