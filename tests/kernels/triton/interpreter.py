"""Repairs what Triton's interpreter gets wrong: it truncates where a device rounds to the nearest, and to even."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

# Types that numpy does not have, as integers of their size.
TORCH_DTYPES = {
    tl.float32: (torch.float32, np.uint32),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}


def convert(array: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Of the interpreter's floats: `array` holds elements of `source`; the result has the bits of `target`."""
    source_dtype, _ = TORCH_DTYPES[source]
    target_dtype, bits = TORCH_DTYPES[target]
    numbers = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).view(source_dtype).to(target_dtype)
    return numbers.view(torch.uint8).numpy().view(bits).reshape(array.shape)


def repair() -> None:
    interpreter._convert_float = convert
