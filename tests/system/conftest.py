from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    paths = {path for path in {item.path for item in items} if path.is_relative_to(Path(__file__).parent)}
    for item in items:
        if item.path in paths:
            item.add_marker("system")
