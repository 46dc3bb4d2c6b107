"""Weights as the C kernels' matrix products read them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The element types of source/rows.h, of weights and caches.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Those of quantised weights, by their bits.
QUANTIZED_ELEMENTS = {8: 3, 4: 4}
FLOAT8_ELEMENT = 5
# Of scales. Those of int8 have a factor of float16 for each 256 inputs.
SCALE_ELEMENTS = {**ELEMENTS, torch.int8: QUANTIZED_ELEMENTS[8], torch.float8_e8m0fnu: 6}
# The kinds of source/activations.h: what a product rounds its input to.
ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class LinearLayer(ctypes.Structure):
    """Mirrors `linear_layer` of source/rows.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("element", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("scale_element", ctypes.c_int64),
        ("has_minima", ctypes.c_int64),
        ("has_zeros", ctypes.c_int64),
        ("table", ctypes.c_int8 * 16),
    )


class SourceWeight(ctypes.Structure):
    """Mirrors `quantized_weight` of source/integers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "minimum", "zero", "scale_factor", "minimum_factor")),
        ("group_size", ctypes.c_int64),
    )


class Float8Source(ctypes.Structure):
    """Mirrors `float8_weight` of source/float8.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "scale")),
        ("block_size", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class QuantizedPanels:
    """How a quantised weight lies in panels.

    Attributes:
        bits: of a code, 8 or 4.
        group_size: of inputs that share a scale, 16 or 32.
        scale_dtype: of scales and minima: int8, where 256 inputs have a factor of float16; float8_e8m0fnu, powers of
            two, and 0, by their exponents; float16, bfloat16, float32.
        has_minima: whether groups have one.
        table: what the codes of 4 bits stand for, 16.
        has_zeros: whether groups have a zero point.
    """

    bits: int
    group_size: int
    scale_dtype: torch.dtype
    has_minima: bool
    table: tuple[int, ...] = ()
    has_zeros: bool = False


def code_table(codes: Sequence[int]) -> tuple[int, ...]:
    """A table of 16 that holds these different codes, in ascending order; empty if there are more. It counts upwards
    from -8 or 0 if such a table can hold them: that needs no looking up."""
    if len(codes) > 16:
        return ()
    for table in (range(-8, 8), range(16)):
        if all(code in table for code in codes):
            return tuple(table)
    return (*codes, *[codes[-1]] * (16 - len(codes)))


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [out_size, in_size] in panels, and its bias [out_size] float32. `CpuKernels.pack_linear` makes it.

    Attributes:
        activation: what a product rounds its input to: float32; bfloat16 over weights of bfloat16 and float8, where
            denormal numbers count as 0 if the processor multiplies bfloat16; int8, with a scale for each 32 inputs,
            over quantised weights.
        quantized: how the panels hold a quantised weight of codes; None: it has none.
        float8_unit: inputs that have a scale together, in panels of float8; 0: the weight is of the panels' dtype, or
            of codes.
    """

    panels: Tensor
    bias: Tensor | None
    in_size: int
    out_size: int
    activation: torch.dtype = torch.float32
    quantized: QuantizedPanels | None = None
    float8_unit: int = 0

    def layer(self) -> LinearLayer:
        """Points into the tensors and holds none of them."""
        layer = LinearLayer(
            panels=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            in_size=self.in_size,
            out_size=self.out_size,
            activation=ACTIVATIONS[self.activation],
        )
        if self.float8_unit:
            layer.element, layer.group_size = FLOAT8_ELEMENT, self.float8_unit
            return layer
        if self.quantized is None:
            layer.element = ELEMENTS[self.panels.dtype]
            return layer
        layer.element = QUANTIZED_ELEMENTS[self.quantized.bits]
        layer.group_size = self.quantized.group_size
        layer.scale_element = SCALE_ELEMENTS[self.quantized.scale_dtype]
        layer.has_minima = self.quantized.has_minima
        layer.has_zeros = self.quantized.has_zeros
        layer.table[: len(self.quantized.table)] = self.quantized.table
        return layer


class PackedExperts:
    """The weights of experts, all of the same sizes, over inputs that are rounded to one dtype."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        """Raises ValueError if one differs from the others, or there is none."""
        forms = dict.fromkeys((linear.in_size, linear.out_size, linear.activation) for linear in linears)
        if len(forms) != 1:
            found = " and ".join(f"[{outs}, {ins}] over {activation}" for ins, outs, activation in forms)
            raise ValueError(f"experts have weights {found or 'of no kind'}; all must be of one")
        self.linears = tuple(linears)
        ((self.in_size, self.out_size, _),) = forms
        self._layers = (LinearLayer * len(linears))(*(linear.layer() for linear in linears))

    def address(self) -> int:
        """Return where their structures lie, one behind the other, for as long as this is there."""
        return ctypes.addressof(self._layers)
