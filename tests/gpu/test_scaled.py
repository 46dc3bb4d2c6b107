"""Products of rounded inputs on a device: `pytest -m gpu tests/gpu`. Skipped where there is no CUDA device."""

import pytest
import torch

from tests.kernels.triton.checks.scaled import device_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("case", device_cases(), ids=lambda case: case.name)
def test_scaled(case):
    case.run(torch.device("cuda"))
