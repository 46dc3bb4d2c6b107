"""Experts and matrix multiplications with quantised weights on a device at real sizes: `pytest -m gpu tests/gpu`.

Skipped without a CUDA device.
"""

from itertools import chain

import pytest
import torch

from testing.kernel_checks import experts, linear, scaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
CASES = chain.from_iterable(checks.device_cases() for checks in (experts, linear, scaled))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products(case):
    case.run(torch.device("cuda"))
