"""The choice of the device for kernels. Without a CUDA device, they run in Triton's interpreter.

Triton reads this choice when it is imported.
"""

import os
import sys

import torch


def choose_device() -> torch.device:
    """Return the device on which the kernels of this process run. Call this before any import of Triton.

    Raises RuntimeError if Triton was imported without its interpreter and there is no CUDA device.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before choose_device; call choose_device first")
    os.environ["TRITON_INTERPRET"] = "1"
    from testing.kernels import interpreter

    interpreter.repair()
    return torch.device("cpu")
