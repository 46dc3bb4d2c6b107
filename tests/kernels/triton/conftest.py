"""The Triton kernels, compiled and in Triton's interpreter. All of these tests are thorough."""

from pathlib import Path

import pytest
import torch

from testing.kernels.device import choose_device

DEVICE = choose_device()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def make_sparse(device, tmp_path):
    """A function that creates byte tensors of which only the touched parts use memory."""
    if device.type == "cuda":
        return lambda size: torch.empty(size, dtype=torch.int8, device=device)
    return lambda size: torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.int8)


@pytest.hookimpl(tryfirst=True)  # must run before markers select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("thorough")
