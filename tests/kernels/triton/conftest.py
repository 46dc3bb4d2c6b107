"""The kernels of Triton, compiled and in its interpreter: these tests are thorough, all of them."""

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
    """Makes bytes of which only those touched take memory."""
    if device.type == "cuda":
        return lambda size: torch.empty(size, dtype=torch.int8, device=device)
    return lambda size: torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.int8)


@pytest.hookimpl(tryfirst=True)  # what is selected goes by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("thorough")
