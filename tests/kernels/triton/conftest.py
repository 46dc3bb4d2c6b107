"""Where there is no CUDA device, the kernels run in Triton's interpreter, which is chosen while Triton is imported."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("something imported Triton before these tests could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.triton import interpreter

    interpreter.repair()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
