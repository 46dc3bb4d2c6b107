"""Has torch's libraries find out which processor this is, before several threads ask them at once.

MKL finds it out at the first call of any of its functions, without a lock: of two threads that call it first, one may
compute its share by functions of low accuracy. Processes that are forked later know what this one has found out.
"""

import torch

# Those that torch has MKL compute, each of which looks for its own variant when it is first called.
_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.sin, torch.tan, torch.cosh, torch.sinh, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.expm1, torch.log, torch.log10, torch.log1p, torch.log2),
    *(torch.sqrt, torch.rsqrt, torch.sigmoid, torch.nn.functional.silu, torch.trunc),
)


def begin_vector_math() -> None:
    """Call each function once, with one element, which takes one thread; and a product of matrices."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1, 1), 0.5, dtype=dtype)
        for function in _FUNCTIONS:
            function(one)
        one.softmax(-1)
        one @ one
