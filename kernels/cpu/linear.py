"""Weights as the C kernels' matrix products read them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.abi import Structure, constants, element_of, ffi


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
    layer: Any = field(init=False, repr=False)  # what C reads, which points into the tensors

    def __post_init__(self) -> None:
        # Of codes, whose element depends on their bits, any.
        dtype = torch.float8_e4m3fn if self.float8_unit else torch.int8 if self.quantized else self.panels.dtype
        layer = Structure(
            "linear_layer",
            panels=self.panels,
            bias=self.bias,
            in_size=self.in_size,
            out_size=self.out_size,
            element=element_of(dtype),
            activation=element_of(self.activation),
            group_size=self.float8_unit,
        )
        if self.quantized is not None:
            bits, group_size, scale_dtype, has_minima, table, has_zeros = astuple(self.quantized)
            layer.put(
                element=getattr(constants, f"ELEMENT_INT{bits}"),
                group_size=group_size,
                scale_element=element_of(scale_dtype),
                has_minima=has_minima,
                has_zeros=has_zeros,
                table=table,
            )
        object.__setattr__(self, "layer", layer.at)


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
        self.layers = ffi.new("linear_layer[]", [linear.layer[0] for linear in linears])
