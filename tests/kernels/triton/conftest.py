import pytest
import torch

from tests.kernels.triton.device import choose_device

DEVICE = choose_device()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
