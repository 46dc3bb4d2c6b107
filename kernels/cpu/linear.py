"""Weights packed into panels for the matrix multiplication of the C kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.cpu.abi import Structure, constants, element_of, ffi

_CODES = {4: constants.ELEMENT_INT4, 6: constants.ELEMENT_INT6}  # by the width of a code


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """The format of a weight that is packed into panels, the memory layout of the C matrix multiplication.

    Attributes:
        element: the weight's dtype; int8 for codes of any width.
        group_size: the number of inputs that share a scale: 16 or 32 for codes; 0 means no scales.
        bits: the width of a code, 8, 6 or 4.
        scale_dtype: the dtype of the scales and minima of codes. With int8, 256 inputs share a factor of float16. With
            float8_e8m0fnu, scales are powers of two or 0, stored as exponents. Also float16, bfloat16 and float32.
        has_minima: whether each group has a minimum.
        table: the 16 values of the 4-bit codes, or the lowest of the 6-bit codes: -32 or 0.
        has_zeros: whether each group has a zero point.
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
    """The weight [out_size, in_size] of a linear layer, packed into panels for the C matrix multiplication, and its
    bias [out_size] float32. `CpuKernels.pack_linear` creates it.

    Attributes:
        panels: the packed bytes, uint8.
        activation: the dtype to which a matmul rounds its input. It is float32, bfloat16 or int8. bfloat16 is used with
            weights of bfloat16 and float8; denormal numbers are treated as 0 if the processor has bfloat16
            instructions. int8 is used with weights that are stored as integer codes; every 32 inputs share a scale.
    """

    panels: Tensor
    bias: Tensor | None
    in_size: int
    out_size: int
    activation: torch.dtype
    format: PanelFormat
    layer: Any = field(init=False, repr=False)  # the C structure, which points into the tensors

    def __post_init__(self) -> None:
        form = self.format
        layer = Structure(
            "linear_layer",
            panels=self.panels,
            bias=self.bias,
            in_size=self.in_size,
            out_size=self.out_size,
            element=_CODES[form.bits] if form.bits in _CODES else element_of(form.element),
            activation=element_of(self.activation),
            group_size=form.group_size,
            scale_element=element_of(form.scale_dtype),
            has_minima=form.has_minima,
            has_zeros=form.has_zeros,
            table=form.table,
        )
        object.__setattr__(self, "layer", layer.at)


class PackedExperts:
    """The packed weights of all experts of a mixture-of-experts layer. All experts have the same sizes and round their
    input to the same dtype."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        """Combine the packed weights of the experts of one layer, so that the C kernels can multiply with all of them
        in one call. Raises ValueError if the experts differ in size or activation dtype, or if the list is empty."""
        forms = dict.fromkeys((linear.in_size, linear.out_size, linear.activation) for linear in linears)
        if len(forms) != 1:
            found = " and ".join(f"[{outs}, {ins}] over {activation}" for ins, outs, activation in forms)
            raise ValueError(
                f"experts have weights {found or 'of no kind'}; all must have the same sizes and activation"
            )
        self.linears = tuple(linears)
        ((self.in_size, self.out_size, _),) = forms
        self.layers = ffi.new("linear_layer[]", [linear.layer[0] for linear in linears])
