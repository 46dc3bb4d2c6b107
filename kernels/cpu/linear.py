"""Weights as the C kernels' matrix products read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.abi import Structure, constants, element_of, ffi


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """How a weight lies in panels.

    Attributes:
        element: of the weight; int8 of codes, whatever their bits are.
        group_size: of inputs that have a scale together: of codes 16 or 32; 0: there are no scales.
        bits: of a code, 8 or 4.
        scale_dtype: of scales and minima of codes: int8, where 256 inputs have a factor of float16; float8_e8m0fnu,
            powers of two, and 0, by their exponents; float16, bfloat16, float32.
        has_minima: whether groups have one.
        table: what the codes of 4 bits stand for, 16.
        has_zeros: whether groups have a zero point.
    """

    element: torch.dtype
    group_size: int = 0
    bits: int = 8
    scale_dtype: torch.dtype = torch.float32
    has_minima: bool = False
    table: tuple[int, ...] = ()
    has_zeros: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [out_size, in_size] in panels, and its bias [out_size] float32. `CpuKernels.pack_linear` makes it.

    Attributes:
        panels: bytes.
        activation: what a product rounds its input to: float32; bfloat16 over weights of bfloat16 and float8, where
            denormal numbers count as 0 if the processor multiplies bfloat16; int8, with a scale for each 32 inputs,
            over codes.
    """

    panels: Tensor
    bias: Tensor | None
    in_size: int
    out_size: int
    activation: torch.dtype
    format: PanelFormat
    layer: Any = field(init=False, repr=False)  # what C reads, which points into the tensors

    def __post_init__(self) -> None:
        form = self.format
        layer = Structure(
            "linear_layer",
            panels=self.panels,
            bias=self.bias,
            in_size=self.in_size,
            out_size=self.out_size,
            element=constants.ELEMENT_INT4 if form.bits == 4 else element_of(form.element),
            activation=element_of(self.activation),
            group_size=form.group_size,
            scale_element=element_of(form.scale_dtype),
            has_minima=form.has_minima,
            has_zeros=form.has_zeros,
            table=form.table,
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
