"""Where there is no CUDA device, the kernels run in Triton's interpreter, which is chosen while Triton is imported."""

import os
import sys

import torch


def choose_device() -> torch.device:
    """What the kernels run on in this process. To be called before anything imports Triton."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("something imported Triton before these tests could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    from testing.kernels import interpreter

    interpreter.repair()
    return torch.device("cpu")
