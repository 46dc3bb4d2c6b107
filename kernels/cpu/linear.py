"""Weights as the C kernels' matrix products read them."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

# The element types of source/rows.h, of weights and caches.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The kinds of source/activations.h: what a product rounds its input to.
ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1}


class LinearLayer(ctypes.Structure):
    """Mirrors `linear_layer` of source/rows.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [out_size, in_size] in panels, and its bias [out_size] float32. `CpuKernels.pack_linear` makes it.

    Attributes:
        activation: what a product rounds its input to: float32, or bfloat16 over weights of bfloat16. There, where the
            processor multiplies bfloat16, denormal numbers count as 0.
    """

    panels: Tensor
    bias: Tensor | None
    in_size: int
    out_size: int
    activation: torch.dtype = torch.float32

    def layer(self) -> LinearLayer:
        """Points into the tensors and holds none of them."""
        bias = None if self.bias is None else self.bias.data_ptr()
        element, activation = ELEMENTS[self.panels.dtype], ACTIVATIONS[self.activation]
        return LinearLayer(self.panels.data_ptr(), bias, self.in_size, self.out_size, element, activation)
